"""Jobs: one episode each, of one repeat of one task."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.types import AGENT_SUFFIX, Row, build_agent_reference

Key = tuple[int, int]
"""The position of a rollout in its run: the index of the task and of the repeat."""


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play."""

    environment: str
    task: int
    repeat: int
    row: Row

    @property
    def key(self) -> Key:
        """The position in the run."""
        return self.task, self.repeat

    @property
    def id(self) -> str:
        """The ID of the rollout."""
        return f"{self.task}:{self.repeat}"


def build_input_row(
    row: Row,
    *,
    environment: str,
    task: int,
    repeat: int = 0,
    sampling: Mapping[str, Any] | None = None,
    agent: str | None = None,
) -> Row:
    """Return *row* as it is sent for one rollout.

    Args:
        row: The task's row.
        environment: The environment that the row is for.
        task: The index of the task in the run.
        repeat: The index of the repeat.
        sampling: Sampling parameters that override those of the row.
        agent: The name of the agent; by default the environment's name with the suffix of our agents.
    """
    return {
        **row,
        "responses_create_params": {**row["responses_create_params"], **(sampling or {})},
        "agent_ref": build_agent_reference(agent or environment + AGENT_SUFFIX),
        TASK_INDEX: task,
        ROLLOUT_INDEX: repeat,
    }


def get_agent_name(row: Row) -> str | None:
    """Return the name of the agent that *row* names, or `None`."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    return name if isinstance(name, str) else None


def get_environment_name(row: Row) -> str | None:
    """Return the environment that *row* names by its agent, or `None`."""
    name = get_agent_name(row)
    return None if name is None else name.removesuffix(AGENT_SUFFIX)


def iter_jobs(inputs: Iterable[Row], *, done: Container[Key] = ()) -> Iterator[Job]:
    """Yield a job for each stamped row in *inputs*, in order, except for the positions in *done*."""
    for row in inputs:
        task, repeat = row[TASK_INDEX], row[ROLLOUT_INDEX]
        if (task, repeat) not in done:
            bare = {key: value for key, value in row.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}
            yield Job(get_environment_name(row) or "", task, repeat, bare)


def compute_seed(seed: int, job: Job) -> int:
    """Return the seed of a job's episode: the same for all repeats of a task, so that they open alike."""
    digest = hashlib.sha256(f"{seed}:{job.environment}:{job.task}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
