"""Jobs: which task is played how often, against which environment, with which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.types import AGENT_SUFFIX, Row, build_agent_reference

Key = tuple[int, int]
"""A rollout's place in its run: the task's index, the repeat's."""


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play."""

    environment: str
    task: int
    repeat: int
    row: Row

    @property
    def key(self) -> Key:
        """Its place in the run."""
        return self.task, self.repeat

    @property
    def id(self) -> str:
        """Its rollout's id."""
        return f"{self.task}:{self.repeat}"


def stamped(
    row: Row,
    *,
    environment: str,
    task: int,
    repeat: int = 0,
    sampling: Mapping[str, Any] | None = None,
    agent: str | None = None,
) -> Row:
    """Return *row* as it is sent for one rollout: the *repeat* of a *task*.

    Args:
        row: The task's row.
        environment: The environment that the row is for.
        task: The task's number in the run.
        repeat: Which repeat of the task, from 0.
        sampling: Sampling parameters that override those of the row.
        agent: The agent's name, if it is not the environment's name with our suffix.
    """
    return {
        **row,
        "responses_create_params": {**row["responses_create_params"], **(sampling or {})},
        "agent_ref": build_agent_reference(agent or environment + AGENT_SUFFIX),
        TASK_INDEX: task,
        ROLLOUT_INDEX: repeat,
    }


def agent(row: Row) -> str | None:
    """Give the name of the agent that *row* is for, `None` where it does not say."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    return name if isinstance(name, str) else None


def route(row: Row) -> str | None:
    """Give the environment *row* is for, `None` where it does not say."""
    name = agent(row)
    return None if name is None else name.removesuffix(AGENT_SUFFIX)


def jobs(inputs: Iterable[Row], *, done: Container[Key] = ()) -> Iterator[Job]:
    """Yield a job for each of *inputs* (stamped rows) that is not *done*, in their order."""
    for row in inputs:
        task, repeat = row[TASK_INDEX], row[ROLLOUT_INDEX]
        if (task, repeat) not in done:
            bare = {key: value for key, value in row.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}
            yield Job(route(row) or "", task, repeat, bare)


def seed_of(seed: int, job: Job) -> int:
    """Give the seed of a job's episode: one per task, the same for its repeats, so that they open alike."""
    digest = hashlib.sha256(f"{seed}:{job.environment}:{job.task}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
