"""Jobs: which task is played how often, against which environment, with which seed."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.types import Row

AGENT = "_simple_agent"
"""What follows an environment's name in the name of its agent (`agent_ref` of a row)."""

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
    row: Row, *, environment: str, task: int, sampling: Mapping[str, Any] | None = None, agent: str | None = None
) -> Row:
    """Give *row* as it is sent: numbered *task*, *sampling* over its own parameters.

    It is for *environment*, and for the *agent* of that, where it is not called as ours are.
    """
    return {key: value for key, value in row.items() if key != ROLLOUT_INDEX} | {
        "responses_create_params": {**row["responses_create_params"], **(sampling or {})},
        "agent_ref": reference(agent or environment + AGENT),
        TASK_INDEX: task,
    }


def reference(agent: str) -> Row:
    """Give how a row names the *agent* it is for."""
    return {"type": "responses_api_agents", "name": agent}


def agent(row: Row) -> str | None:
    """Give the name of the agent that *row* is for, `None` where it does not say."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    return name if isinstance(name, str) else None


def route(row: Row) -> str | None:
    """Give the environment *row* is for, `None` where it does not say."""
    name = agent(row)
    return None if name is None else name.removesuffix(AGENT)


def jobs(inputs: Iterable[Row], *, repeats: int, done: Container[Key] = ()) -> Iterator[Job]:
    """Yield every job of *inputs* (stamped rows) that is not *done*, task by task."""
    for row in inputs:
        environment, task = route(row) or "", row[TASK_INDEX]
        bare = {key: value for key, value in row.items() if key != TASK_INDEX}
        for repeat in range(repeats):
            if (task, repeat) not in done:
                yield Job(environment, task, repeat, bare)


def seed_of(seed: int, job: Job) -> int:
    """Give the seed of a job's episode: one per task, the same for its repeats, so that they open alike."""
    digest = hashlib.sha256(f"{seed}:{job.environment}:{job.task}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
