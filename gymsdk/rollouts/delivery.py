"""Delivery: jobs played by running servers, ours or NeMo Gym's, each posted to the agent that its row names."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from gymsdk import http, rows
from gymsdk.client import ServerClient, Unknown
from gymsdk.errors import Failed, recast
from gymsdk.http import Answer
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.outcome import Rollout
from gymsdk.rollouts import answered
from gymsdk.rollouts.jobs import Job, agent, seed_of
from gymsdk.rollouts.tries import Played, guarded, settled
from gymsdk.sitting import Budget
from gymsdk.types import Row

AGAIN = 2
"""How often a row is sent once more whose answer was lost: under one id a server of ours plays it once."""

COMING = 10.0
"""Seconds that a row waits for an agent that the head does not know just now."""

LOOKING = 1.0
"""Seconds between two looks for it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How jobs are played elsewhere: by whom *client* knows, each within *budget* and answered within *seconds*.

    *name* begins the ids of its rollouts, which nobody else uses; the servers play a row *once* that comes twice
    under one of them, or are not known to. *retry* is how often one that is not there is looked for, for
    *coming* seconds where the head does not know it.
    """

    client: ServerClient
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    attempts: int = 3
    seconds: float = 900.0
    name: str = field(default_factory=lambda: f"r{uuid4().hex[:16]}")
    once: bool = False
    retry: http.Retry = http.RETRY
    coming: float = COMING

    @property
    def connections(self) -> int:
        """Count the request by which the servers play a job."""
        return 1

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open nothing: the servers are."""
        yield

    async def __call__(self, job: Job) -> Played:
        """Have *job* played until it has been judged, cannot be, or has been tried often enough."""
        return await settled(job, self.tried, attempts=self.attempts)

    async def tried(self, job: Job, attempt: int) -> Rollout:
        """Have *job* played one time, and give what came of it."""
        rollout = await guarded(job, seed_of(self.seed, job), self._played(job, attempt))
        return rollout.model_copy(update={"rollout_id": self._id(job, attempt)})

    async def _played(self, job: Job, attempt: int) -> Rollout:
        began = time.perf_counter()
        body = answered.object_of(await self._delivered(agent(job.row) or "", self._body(job, attempt)), "host")
        spent = (time.perf_counter() - began) * 1e3
        return answered.rollout(body, job, seed_of(self.seed, job), milliseconds=spent)

    def _body(self, job: Job, attempt: int) -> Row:
        ours = {"seed": seed_of(self.seed, job), "repeat": job.repeat, "budget": self.budget.model_dump()}
        return {
            **job.row,
            TASK_INDEX: job.task,
            ROLLOUT_INDEX: job.repeat,
            "_ng_rollout_id": self._id(job, attempt),
            "gymsdk": ours,
        }

    def _id(self, job: Job, attempt: int) -> str:
        return f"{self.name}.{job.task}.{job.repeat}.{attempt}"

    async def _delivered(self, name: str, row: Row) -> Answer:
        """Give what the agent *name* answers to *row*; sent once more where it is not played twice. Raises `Failed`."""
        loop, body = asyncio.get_running_loop(), rows.written(row)
        deadline = loop.time() + self.seconds
        for number in range(AGAIN + 1):
            url = await self._url(name)
            try:
                left = max(0.001, deadline - loop.time())
                carried = self.client.build_headers_for(url)
                return await http.post(url + "/run", body, headers=carried, timeout=left, retry=self.retry, once=True)
            except Failed as error:
                if error.kind == "model_unreachable":
                    self.client.forget(name, url)
                again = error.kind == "model_unreachable" and (self.once or isinstance(error, http.Unsent))
                if number == AGAIN or not again or loop.time() >= deadline:
                    raise of_server(error) from error
            await asyncio.sleep(min(self.retry.get_wait_seconds(number), max(0.0, deadline - loop.time())) * random.random())
        raise AssertionError("the last time either answers or raises")

    async def _url(self, name: str) -> str:
        """Give where the agent *name* is; one that is not there may be about to be started anew. Raises `Failed`."""
        clock = asyncio.get_running_loop().time
        until = clock() + self.coming
        while True:
            try:
                return await self.client.url(name)
            except Unknown:
                if clock() >= until:
                    raise
            except Failed as error:
                raise of_server(error) from error
            await asyncio.sleep(random.uniform(LOOKING / 2, LOOKING))


def of_server(error: Failed) -> Failed:
    """Give the failure to reach a server as that, and not as a model's."""
    found = recast(error, Failed, kind=error.kind.replace("model_", "server_", 1))
    found.stage = "host"
    return found
