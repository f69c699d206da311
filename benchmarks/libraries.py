"""Compare gymsdk's own code with what could replace it: CPU time per call, and the ratio.

    python benchmarks/libraries.py

Each way is measured in turn, and the lowest of `ROUNDS` values counts: other work on the machine only adds CPU time.
The exit status is 1 if a replacement is as fast as our code, which then has no reason to stay.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from gymsdk import Verdict, hookimpl, play, responses
from gymsdk.concurrency import run_event_loop, timeout_at
from gymsdk.environment import Environment
from gymsdk.memory import EpisodeCounter, collect_rarely
from gymsdk.observability.metrics import BUCKET_SECONDS, ServerMetrics
from gymsdk.types import Episode, Item

ROUNDS = 5
CALLS, EPISODES = 20_000, 4096
FAR = 1e9
"""A time of the event loop's clock that no run reaches."""


def enter_own_deadlines() -> None:
    async def enter() -> None:
        for _ in range(CALLS):
            with timeout_at(FAR):
                pass

    run_event_loop(enter())


def enter_deadlines() -> None:
    async def enter() -> None:
        for _ in range(CALLS):
            async with asyncio.timeout_at(FAR):  # noqa: ASYNC100 - only entering it is measured
                pass

    run_event_loop(enter())


def count_own_responses() -> None:
    metrics = ServerMetrics("own")
    for _ in range(CALLS):
        metrics.record_response("/run", 200, 0.01, received=100, sent=1000)


def count_responses() -> None:
    registry = CollectorRegistry()
    received, sent = (Counter(name, name, ["route"], registry=registry) for name in ("received", "sent"))
    answered = Counter("answered", "answered", ["route", "status"], registry=registry)
    seconds = Histogram("seconds", "seconds", ["route"], buckets=BUCKET_SECONDS, registry=registry)
    for _ in range(CALLS):
        received.labels("/run").inc(100)
        sent.labels("/run").inc(1000)
        answered.labels("/run", "200").inc()
        seconds.labels("/run").observe(0.01)


class Always:
    """An environment with a reward for every reply."""

    @hookimpl
    def verify(self) -> Verdict:
        return Verdict(reward=1.0)


class SlowModel:
    """A model that answers after all episodes have begun."""

    name = "slow"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002 - the protocol
        await asyncio.sleep(3.0)
        usage = responses.build_usage(1, 1)
        return responses.build_response([responses.build_message("4")], model="slow", usage=usage, request=request)

    async def aclose(self) -> None: ...


def play_episodes() -> None:
    environment, model, counter = Environment("always", Always()), SlowModel(), EpisodeCounter()

    async def play_one(number: int) -> None:
        counter.begin()
        try:
            await play(environment, model, {"responses_create_params": {"input": f"{number} + 1"}})
        finally:
            counter.end()

    async def play_all() -> None:
        await asyncio.gather(*map(play_one, range(EPISODES)))

    run_event_loop(play_all())


def play_and_collect_rarely() -> None:
    with collect_rarely():
        play_episodes()


ROWS: dict[str, tuple[int, Callable[[], None], Callable[[], None]]] = {
    "a deadline: timeout_at, asyncio.timeout_at": (CALLS, enter_own_deadlines, enter_deadlines),
    "a counted response: ServerMetrics, prometheus_client": (CALLS, count_own_responses, count_responses),
    f"one of {EPISODES:,} episodes: collect_rarely, the automatic collector": (
        EPISODES,
        play_and_collect_rarely,
        play_episodes,
    ),
}


def measure(way: Callable[[], None], calls: int) -> float:
    """Return the CPU time of a call in microseconds."""
    began = time.process_time()
    way()
    return 1e6 * (time.process_time() - began) / calls


def main() -> int:
    """Print the measurements; return 1 if a replacement is as fast."""
    is_justified = True
    for name, (calls, own, replacement) in ROWS.items():
        rounds = [(measure(own, calls), measure(replacement, calls)) for _ in range(ROUNDS)]
        own_time, other_time = (min(times) for times in zip(*rounds, strict=True))
        is_justified &= own_time < other_time
        print(f"{name:<66} {own_time:7.2f} {other_time:7.2f} µs, {other_time / own_time:4.1f} times as much")
    return 0 if is_justified else 1


if __name__ == "__main__":
    sys.exit(main())
