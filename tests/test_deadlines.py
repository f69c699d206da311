"""Deadlines, and the patience of some of them."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.bounds import bounded
from gymsdk.deadlines import LONGEST, Deadline, current, from_now, until, waiting


async def test_a_deadline_comes_nearer():
    deadline = Deadline(from_now(60))
    before = deadline.get_remaining_seconds()
    await asyncio.sleep(0.02)
    assert 0 < deadline.get_remaining_seconds() < before <= 60


async def test_a_passed_deadline_leaves_nothing():
    assert Deadline(from_now(-1)).get_remaining_seconds() == 0


async def test_a_patient_deadline_does_not_count_waiting_for_what_is_bounded_itself():
    deadline = Deadline(from_now(0.2), pausable=True)

    async def judged():
        with waiting():
            await asyncio.sleep(0.5)
        return "judged"

    with until(deadline):
        assert await bounded(judged(), deadline) == "judged"
    assert deadline.get_remaining_seconds() > 0


async def test_two_waits_at_once_move_a_deadline_once():
    deadline = Deadline(from_now(60), pausable=True)

    async def wait():
        with waiting():
            await asyncio.sleep(0.1)

    with until(deadline):
        await asyncio.gather(wait(), wait())
    assert deadline.get_remaining_seconds() == pytest.approx(60, abs=0.09)


async def test_a_patient_deadline_still_ends_what_hangs_by_itself():
    deadline = Deadline(from_now(0.05), pausable=True)
    with until(deadline), pytest.raises(TimeoutError):
        await bounded(asyncio.sleep(60), deadline)


async def test_another_deadline_counts_every_wait():
    deadline = Deadline(from_now(0.05))

    async def wait():
        with waiting():
            await asyncio.sleep(60)

    with until(deadline), pytest.raises(TimeoutError):
        await bounded(wait(), deadline)


async def test_outside_of_any_stage_there_is_a_long_one():
    assert current().get_remaining_seconds() == pytest.approx(LONGEST, abs=60)
