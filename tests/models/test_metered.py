from __future__ import annotations

import asyncio

import pytest

from gymsdk import Failed, responses
from gymsdk.episode import StageTimer
from gymsdk.models.registry import MeteredModel
from gymsdk.models.scripted import build
from gymsdk.responses import UsageByRole


class Slow:
    """A model that answers after 10 ms and counts its concurrent calls."""

    def __init__(self) -> None:
        self.waiting = 0
        self.max_waiting = 0

    async def respond(self, request, *, episode=None):
        self.waiting += 1
        self.max_waiting = max(self.max_waiting, self.waiting)
        try:
            await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        return responses.build_response([], model="slow")


async def test_a_call_has_a_time_limit():
    class NeverAnswers:
        async def respond(self, request, *, episode=None):
            await asyncio.Event().wait()

    with pytest.raises(Failed, match=r"the judge model did not answer within 0\.05 s") as caught:
        await MeteredModel(NeverAnswers(), role="judge", seconds=0.05).respond({})
    assert (caught.value.kind, caught.value.retryable) == ("model_timeout", True)


async def test_concurrent_calls_are_limited_and_none_is_rejected():
    slow = Slow()
    metered = MeteredModel(slow, role="judge", concurrency=3)
    answers = await asyncio.gather(*(metered.respond({}) for _ in range(10)))
    assert len(answers) == 10
    assert slow.max_waiting == 3


def test_a_model_can_be_used_in_one_event_loop_after_another():
    metered = MeteredModel(Slow(), role="judge", concurrency=1)

    async def twice():
        await asyncio.gather(metered.respond({}), metered.respond({}))

    asyncio.run(twice())
    asyncio.run(twice())


async def test_a_failed_call_has_a_model_kind_releases_the_semaphore_and_is_not_counted():
    metered = MeteredModel(build("oracle"), role="judge", concurrency=1)
    used: UsageByRole = {}
    with StageTimer(used, {}, "verify"):
        for _ in range(3):
            with pytest.raises(Failed) as caught:
                await metered.respond({})
            assert caught.value.kind == "model_no_episode"
    assert used == {}
