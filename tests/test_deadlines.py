"""Deadlines, and deadlines that exclude waiting time."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.plugins.calls import (
    Deadline,
    get_loop_time_after,
    pause_deadline,
    run_stage,
    run_until_deadline,
)


async def test_a_patient_deadline_excludes_waits_with_their_own_limit():
    deadline = Deadline(get_loop_time_after(0.2), pausable=True)

    async def judged():
        with pause_deadline():
            await asyncio.sleep(0.5)
        return "judged"

    with run_stage("verify", deadline):
        assert await run_until_deadline(judged(), deadline) == "judged"
    assert deadline.get_remaining_seconds() > 0


async def test_two_concurrent_waits_extend_a_deadline_once():
    deadline = Deadline(get_loop_time_after(60), pausable=True)

    async def wait():
        with pause_deadline():
            await asyncio.sleep(0.1)

    with run_stage("verify", deadline):
        await asyncio.gather(wait(), wait())
    assert deadline.get_remaining_seconds() == pytest.approx(60, abs=0.09)


async def test_a_normal_deadline_includes_every_wait_and_a_patient_one_other_hanging_code():
    async def wait():
        with pause_deadline():
            await asyncio.sleep(60)

    for code, pausable in ((wait(), False), (asyncio.sleep(60), True)):
        deadline = Deadline(get_loop_time_after(0.05), pausable=pausable)
        with run_stage("verify", deadline), pytest.raises(TimeoutError):
            await run_until_deadline(code, deadline)
