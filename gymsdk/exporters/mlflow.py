"""Send a run to MLflow: settings as parameters, curves and final metrics, and the files as artifacts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from gymsdk.errors import GymsdkError
from gymsdk.exporters.base import ExportOptions, build_final_metrics, build_settings, compute_run_id, list_files
from gymsdk.runs import Run
from gymsdk.types import Row

RUN_TAG = "gymsdk.run"
"""The tag with the identifier of the run, by which a second export finds the first one."""

MAX_METRICS, MAX_PARAMS, MAX_VALUE_CHARS = 1000, 100, 6000
"""MLflow's limits of a request: metrics, parameters, and the characters of a parameter's value."""

PROGRESS_PREFIX = "progress/"
"""The prefix of the curves, by which they differ from the final metrics."""

T = TypeVar("T")


def create(run: Run, options: ExportOptions) -> MlflowExporter:
    """Return the exporter of *run*; raises `GymsdkError` if the tracking server cannot be reached or refuses it."""
    identifier = compute_run_id(run)
    with _explaining_errors():
        client = MlflowClient()
        experiment = client.get_experiment_by_name(options.project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(options.project)
        known = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{identifier}'")
        target = known[0] if known else client.create_run(experiment_id, run_name=run.name, tags={RUN_TAG: identifier})
        exporter = MlflowExporter(run, client, target.info.run_id, options)
        exporter.last_step = int(target.data.metrics.get(f"{PROGRESS_PREFIX}rollouts", 0))
        if not known:
            params = [Param(_clean(name), str(value)[:MAX_VALUE_CHARS]) for name, value in build_settings(run).items()]
            for batch in _split(params, MAX_PARAMS):
                client.log_batch(target.info.run_id, params=batch)
    return exporter


class MlflowExporter:
    """Sends a run to a run of MLflow.

    Args:
        client: The client of the tracking server.
        target: The identifier of MLflow's run.
        options: How the run is exported.

    Attributes:
        last_step: The number of rollouts that an earlier export has sent metrics of; MLflow would keep both points.
    """

    def __init__(self, run: Run, client: MlflowClient, target: str, options: ExportOptions) -> None:
        self.last_step = 0
        self._run = run
        self._client = client
        self._target = target
        self._options = options

    def add(self, rollout: Row) -> None:
        """Do nothing: MLflow has no rows; the files have them."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a point of each curve."""
        if step > self.last_step:
            self._log({f"{PROGRESS_PREFIX}{name}": value for name, value in metrics.items()}, step)

    def finish(self) -> str:
        """Send the final metrics and the files; return the identifiers of the experiment and the run."""
        self._log(build_final_metrics(self._run), 0)
        with _explaining_errors():
            if self._options.content:
                for path in list_files(self._run):
                    self._client.log_artifact(self._target, str(path))
            self._client.set_terminated(self._target)
            run = self._client.get_run(self._target)
        return f"{self._client.tracking_uri}, experiment {run.info.experiment_id}, run {self._target}"

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [Metric(_clean(name), value, now, step) for name, value in metrics.items()]
        with _explaining_errors():
            for batch in _split(points, MAX_METRICS):
                self._client.log_batch(self._target, metrics=batch)


@contextmanager
def _explaining_errors() -> Iterator[None]:
    try:
        yield
    except (MlflowException, OSError) as error:
        raise GymsdkError(f"MLflow: {error}; MLFLOW_TRACKING_URI names the tracking server") from error


def _clean(name: str) -> str:
    """Return *name* with the characters that MLflow allows in names."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _split(values: Sequence[T], size: int) -> Iterator[list[T]]:
    return (list(values[start : start + size]) for start in range(0, len(values), size))
