"""The common part of the exporters: the run's identifier, its metrics so far, and the loop that follows a run."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from gymsdk import jsonl
from gymsdk.errors import UsageError
from gymsdk.rollouts.folder import FILES
from gymsdk.runs import Run
from gymsdk.types import Row

EXTRAS = ("mlflow", "otel", "wandb")
"""The names of the services, which are the names of the extras too."""

MAX_POINTS = 200
"""The number of points of a curve, about, if the run's number of rollouts is known."""

POINT_ROLLOUTS = 100
"""The number of rollouts between two points of a curve otherwise."""


@dataclass(frozen=True)
class ExportOptions:
    """How a run is exported.

    Attributes:
        project: The project of W&B, the experiment of MLflow, or the name of the service of OpenTelemetry.
        content: Whether the texts of the conversations are sent: the run's files, or the messages of spans.
    """

    project: str = "gymsdk"
    content: bool = False


class Exporter(Protocol):
    """Sends a run to a service."""

    def add(self, rollout: Row) -> None:
        """Send a rollout, given by its row in the index."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of the run after its first *step* rollouts."""

    def finish(self) -> str:
        """Send the final metrics and files; return the address of the run in the service."""


@dataclass
class _Totals:
    rollouts: int = 0
    scored: int = 0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, row: Row) -> None:
        self.rollouts += 1
        self.scored += row["reward"] is not None
        for name in ("reward", "turns", "tool_calls", "tokens", "seconds"):
            if row[name] is not None:
                self.sums[name] += row[name]
                self.counts[name] += 1

    def iter_metrics(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        yield f"{prefix}rollouts", self.rollouts
        yield f"{prefix}scored", self.scored
        yield from ((f"{prefix}mean/{name}", total / self.counts[name]) for name, total in self.sums.items())


class Progress:
    """The metrics of a run so far: numbers of rollouts and means, for the run and for each environment."""

    def __init__(self) -> None:
        self._all = _Totals()
        self._environments: defaultdict[str, _Totals] = defaultdict(_Totals)

    @property
    def rollouts(self) -> int:
        """The number of rollouts."""
        return self._all.rollouts

    def add(self, row: Row) -> None:
        """Count a rollout, given by its row in the index."""
        self._all.add(row)
        self._environments[row["environment"]].add(row)

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics; those of an environment begin with its name if there are several."""
        metrics = dict(self._all.iter_metrics())
        if len(self._environments) > 1:
            for name, totals in sorted(self._environments.items()):
                metrics |= totals.iter_metrics(f"{name}/")
        return metrics


def build_exporter(service: str, run: Run, options: ExportOptions) -> Exporter:
    """Return the exporter to a service.

    Args:
        service: One of `EXTRAS`.
        run: The run.
        options: How it is exported.

    Raises:
        UsageError: The extra of the service is not installed.
        GymsdkError: The service cannot be reached, or refuses the run.
    """
    exporter: Exporter = _import(service).create(run, options)
    return exporter


def check_extra(service: str) -> None:
    """Raise `UsageError` if *service* is not one of `EXTRAS`, or its extra is not installed."""
    if service not in EXTRAS:
        raise UsageError(f"there is no export to {service!r}; the services: {', '.join(EXTRAS)}")
    _import(service)


def export_run(run: Run, exporter: Exporter, wait: Callable[[], bool] | None = None) -> int:
    """Send a run, and return the number of its rollouts.

    Args:
        run: The run.
        exporter: The exporter.
        wait: Waits until there may be new rollouts, and returns whether the run goes on. Without it, the rollouts that
            exist are sent.

    Raises:
        GymsdkError: The service cannot be reached, or refuses the run.
    """
    progress = Progress()
    expected = run.source.count_inputs()
    interval = max(1, math.ceil(expected / MAX_POINTS)) if expected else POINT_ROLLOUTS
    last = 0
    is_growing = True
    while is_growing:
        # Before the rows are read: the last round then sends what was written before the run ended.
        is_growing = wait() if wait else False
        run.update()
        for row in run.iter_rows(after=last):
            last = row["id"]
            exporter.add(row)
            progress.add(row)
            if progress.rollouts % interval == 0:
                exporter.log(progress.compute_metrics(), progress.rollouts)
    if progress.rollouts % interval:
        exporter.log(progress.compute_metrics(), progress.rollouts)
    return progress.rollouts


def compute_run_id(run: Run) -> str:
    """Return what identifies a run, wherever its folder is moved to: two exports of a run have the same identifier."""
    about = run.source.read_about()
    parts = [run.name, *(str(about.get(key)) for key in ("started", "command", "folder"))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping, with dots in the names and without empty values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            flat[f"{prefix}{key}"] = value
    return flat


def build_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run, with its command and its version of gymsdk."""
    about = run.source.read_about()
    distributions = about.get("distributions") or {}
    known = {"command": about.get("command"), "python": about.get("python"), "gymsdk": distributions.get("gymsdk")}
    return flatten(run.settings) | {key: value for key, value in known.items() if value is not None}


def build_final_metrics(run: Run) -> dict[str, float]:
    """Return the metrics in `metrics.json`, those of several environments with their names; empty before the end."""
    metrics = run.metrics
    final_metrics: dict[str, float] = {}
    for metric in metrics:
        prefix = f"{metric.get('environment')}/" if len(metrics) > 1 else ""
        numbers = {
            **(metric.get("agent_metrics") or {}),
            **{f"outcome/{outcome}": count for outcome, count in (metric.get("outcomes") or {}).items()},
        }
        final_metrics |= {
            f"{prefix}{name}": float(value) for name, value in numbers.items() if jsonl.is_finite_number(value)
        }
    return final_metrics


def list_files(run: Run) -> list[Path]:
    """Return the files of a run."""
    if not run.source.path.is_dir():
        return [path for path in (*run.source.files, run.source.inputs) if path.is_file()]
    return [path for path in (run.source.path / name for name in (*FILES, "notes.jsonl")) if path.is_file()]


def _import(service: str) -> ModuleType:
    """Return the module of *service*."""
    assert service in EXTRAS, service
    try:
        return import_module(f"gymsdk.exporters.{service}")
    except ImportError as error:
        # A defect of gymsdk, and no missing extra.
        if (error.name or "").startswith("gymsdk"):
            raise
        raise UsageError(
            f"the export to {service} needs a package that is not installed ({error.name});"
            f" install it: pip install 'gymsdk[{service}]'"
        ) from error
