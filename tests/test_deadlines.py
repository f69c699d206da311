"""Deadlines, and the patience of some of them."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.deadlines import (
    DEFAULT_STAGE_SECONDS,
    Deadline,
    apply_deadline,
    get_deadline,
    get_loop_time_after,
    pause_deadline,
    run_until_deadline,
)


async def test_a_deadline_comes_nearer():
    deadline = Deadline(get_loop_time_after(60))
    before = deadline.get_remaining_seconds()
    await asyncio.sleep(0.02)
    assert 0 < deadline.get_remaining_seconds() < before <= 60


async def test_a_passed_deadline_leaves_nothing():
    assert Deadline(get_loop_time_after(-1)).get_remaining_seconds() == 0


async def test_a_patient_deadline_does_not_count_waiting_for_what_is_bounded_itself():
    deadline = Deadline(get_loop_time_after(0.2), pausable=True)

    async def judged():
        with pause_deadline():
            await asyncio.sleep(0.5)
        return "judged"

    with apply_deadline(deadline):
        assert await run_until_deadline(judged(), deadline) == "judged"
    assert deadline.get_remaining_seconds() > 0


async def test_two_waits_at_once_move_a_deadline_once():
    deadline = Deadline(get_loop_time_after(60), pausable=True)

    async def wait():
        with pause_deadline():
            await asyncio.sleep(0.1)

    with apply_deadline(deadline):
        await asyncio.gather(wait(), wait())
    assert deadline.get_remaining_seconds() == pytest.approx(60, abs=0.09)


async def test_a_patient_deadline_still_ends_what_hangs_by_itself():
    deadline = Deadline(get_loop_time_after(0.05), pausable=True)
    with apply_deadline(deadline), pytest.raises(TimeoutError):
        await run_until_deadline(asyncio.sleep(60), deadline)


async def test_another_deadline_counts_every_wait():
    deadline = Deadline(get_loop_time_after(0.05))

    async def wait():
        with pause_deadline():
            await asyncio.sleep(60)

    with apply_deadline(deadline), pytest.raises(TimeoutError):
        await run_until_deadline(wait(), deadline)


async def test_outside_of_any_stage_there_is_a_long_one():
    assert get_deadline().get_remaining_seconds() == pytest.approx(DEFAULT_STAGE_SECONDS, abs=60)
