"""Verdicts that wait for a worker: the wait does not count towards the deadline of `verify`."""

from __future__ import annotations

import asyncio
import time

import pytest

from gymsdk import Environment, Task, Verdict, environment, hookimpl, model, offload, play
from gymsdk.workers.offload import use_executor
from gymsdk.workers.processes import ProcessExecutor


@offload(timeout=10)
def ponder(seconds):
    time.sleep(seconds)
    return 1.0


class Ponders:
    @hookimpl
    async def verify(self):
        return Verdict(reward=await ponder(0.3))


@pytest.fixture
def one_worker():
    local = ProcessExecutor(1)
    with use_executor(local):
        yield local
    local.close()


@pytest.mark.slow
async def test_verdicts_that_wait_for_a_worker_are_all_graded(one_worker, monkeypatch):
    monkeypatch.setattr(environment, "VERIFY_SECONDS", 2.0)
    ponders = Environment("ponders", Ponders())
    rollouts = await asyncio.gather(*(play(ponders, model("scripted/null"), Task.ask("?")) for _ in range(8)))
    assert [rollout.reward for rollout in rollouts] == [1.0] * 8
