"""Deadlines, and deadlines that exclude waiting time."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.plugins.calls import (
    DEFAULT_STAGE_SECONDS,
    Deadline,
    get_deadline,
    get_loop_time_after,
    pause_deadline,
    run_stage,
    run_until_deadline,
)


async def test_the_remaining_time_decreases():
    deadline = Deadline(get_loop_time_after(60))
    before = deadline.get_remaining_seconds()
    await asyncio.sleep(0.02)
    assert 0 < deadline.get_remaining_seconds() < before <= 60


async def test_a_passed_deadline_has_no_remaining_time():
    assert Deadline(get_loop_time_after(-1)).get_remaining_seconds() == 0


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


async def test_a_patient_deadline_still_ends_other_hanging_code():
    deadline = Deadline(get_loop_time_after(0.05), pausable=True)
    with run_stage("verify", deadline), pytest.raises(TimeoutError):
        await run_until_deadline(asyncio.sleep(60), deadline)


async def test_a_normal_deadline_includes_every_wait():
    deadline = Deadline(get_loop_time_after(0.05))

    async def wait():
        with pause_deadline():
            await asyncio.sleep(60)

    with run_stage("verify", deadline), pytest.raises(TimeoutError):
        await run_until_deadline(wait(), deadline)


async def test_outside_of_a_stage_the_deadline_is_long():
    assert get_deadline().get_remaining_seconds() == pytest.approx(DEFAULT_STAGE_SECONDS, abs=60)
