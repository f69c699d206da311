"""Send a run to Weights & Biases: settings, curves, a summary, a table of rollouts, and the files as an artifact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import wandb

from gymsdk.errors import GymsdkError
from gymsdk.exporters.base import ExportOptions, build_final_metrics, build_settings, compute_run_id, list_files
from gymsdk.runs import Run
from gymsdk.runs.records import iter_texts
from gymsdk.types import Row

MAX_TABLE_ROWS = 1000
"""The number of rollouts of the table; a longer run is sampled evenly."""

MAX_TEXT_CHARS = 20_000
"""The length of a conversation in the table."""

COLUMNS = (
    "environment",
    "task",
    "repeat",
    "reward",
    "outcome",
    "ended",
    "turns",
    "tool_calls",
    "tokens",
    "seconds",
    "answer",
    "failure",
    "prompt",
)


def create(run: Run, options: ExportOptions) -> WandbExporter:
    """Return the exporter of *run*; raises `GymsdkError` if W&B cannot be reached or refuses the run."""
    try:
        target = wandb.init(
            project=options.project,
            id=compute_run_id(run),
            name=run.name,
            resume="allow",
            config=build_settings(run),
            job_type="rollout",
            tags=sorted(run.settings.get("environments") or {})[:10] or None,
            # W&B would also send the console, the Git state, the code and the load of this process, not of the run.
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True),
        )
    except wandb.errors.Error as error:
        raise GymsdkError(f"W&B: {error}; log in with `wandb login`, or set WANDB_MODE=offline") from error
    return WandbExporter(run, target, options)


class WandbExporter:
    """Sends a run to an open run of W&B.

    Args:
        target: The run of W&B.
        options: How the run is exported.
    """

    def __init__(self, run: Run, target: wandb.Run, options: ExportOptions) -> None:
        self._run = run
        self._target = target
        self._options = options
        # The curves are drawn over the number of rollouts; an interrupted export may send a point twice.
        target.define_metric("rollouts")
        target.define_metric("*", step_metric="rollouts")

    def add(self, rollout: Row) -> None:
        """Do nothing: the table is written at the end."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a point of each curve."""
        self._target.log({**metrics, "rollouts": step})

    def finish(self) -> str:
        """Send the summary, the table and the artifact; return the run's address, or the command that uploads it."""
        self._target.summary.update(build_final_metrics(self._run))
        self._target.log({"table": self._build_table()})
        if self._options.content:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", self._run.name), type="run")
            for path in list_files(self._run):
                # W&B need not copy the file before it uploads it: a finished run does not change.
                artifact.add_file(str(path), policy="immutable")
            self._target.log_artifact(artifact)
        # The folder of the run's files is `files` in the folder that `wandb sync` uploads.
        address = self._target.url or f"wandb sync {self._target.dir.removesuffix('/files')}"
        self._target.finish()
        return address

    def _build_table(self) -> wandb.Table:
        total = len(self._run)
        step = max(1, -(-total // MAX_TABLE_ROWS))
        columns: list[str | int] = [*COLUMNS, *(["conversation"] if self._options.content else [])]
        table = wandb.Table(columns=columns)
        for number, row in enumerate(self._run.iter_rows()):
            if number % step == 0:
                table.add_data(*(row[name] for name in COLUMNS), *self._read_conversation(row))
        return table

    def _read_conversation(self, row: Row) -> list[Any]:
        if not self._options.content:
            return []
        text = "\n\n".join(iter_texts(self._run.queries.read(row["id"])))
        return [text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"]
