"""Isolation: episodes interleaved at random, and side by side, give what they give one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gymsdk.checks.check import Check, Finding
from gymsdk.checks.performance import Performance, Script, difference, scripts
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.errors import UsageError

EXAMPLES = 15
"""Interleavings that are tried."""

TASKS = 3
"""Tasks that are played, by the oracle and at random; the first one twice."""

MOST = 12
"""Steps of an interleaving that a finding prints."""


class _Drift(AssertionError):
    """An interleaved episode went otherwise than alone; the message says where, and after what."""


async def _look(subject: Subject) -> list[Finding]:
    async with subject.fresh() as environment:
        played = await scripts(subject, environment, tasks=TASKS)
        played = [*played, *played[:1]]
        alone = [await Performance(script, environment, subject.budget).whole() for script in played]
        return await _side_by_side(subject, environment, played, alone) or await _interleaved(
            subject, environment, played, alone
        )


async def _side_by_side(
    subject: Subject, environment: Environment, played: Sequence[Script], alone: Sequence[Any]
) -> list[Finding]:
    plays = [Performance(script, environment, subject.budget) for script in (*played, *played)]
    await asyncio.gather(*(each.whole() for each in plays))
    for each, expected in zip(plays, [*alone, *alone], strict=True):
        if found := difference(expected, each.seen):
            return [Finding(seen=f"{each.script.title}, played beside {len(plays) - 1} others: {found}")]
    return []


async def _interleaved(
    subject: Subject, environment: Environment, played: Sequence[Script], alone: Sequence[Any]
) -> list[Finding]:
    loop = asyncio.get_running_loop()

    def run(picks: list[int]) -> None:
        asyncio.run_coroutine_threadsafe(_one(subject, environment, played, alone, picks), loop).result()

    found = await asyncio.to_thread(_shrunk, run, len(played))
    return [Finding(seen=found)] if found else []


async def _one(
    subject: Subject,
    environment: Environment,
    played: Sequence[Script],
    alone: Sequence[Any],
    picks: Sequence[int],
) -> None:
    """Play all, the next phase of a picked one at a time, then the rest one by one; raises `_Drift`."""
    plays = [Performance(script, environment, subject.budget) for script in played]
    steps = [f"{chr(ord('A') + pick)} {await plays[pick].advance()}" for pick in picks if not plays[pick].over]
    seen = [await each.whole() for each in plays]
    for each, expected, got in zip(plays, alone, seen, strict=True):
        if found := difference(expected, got):
            order = ", ".join(steps[:MOST]) + (", …" if len(steps) > MOST else "")
            raise _Drift(f"{each.script.title}, after the interleaved steps [{order}] of several episodes: {found}")


def _shrunk(run: Any, count: int) -> str | None:
    """Give what the smallest interleaving that goes wrong shows, `None` where none does."""
    try:
        from hypothesis import HealthCheck, Phase, Verbosity, given, settings
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky
    except ImportError:
        raise UsageError('this check draws with hypothesis; run: pip install "gymsdk[author]"') from None

    calm = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    wrong: list[str] = []

    @calm
    @given(st.lists(st.integers(0, count - 1), min_size=4, max_size=6 * count))
    def interleaved(picks: list[int]) -> None:
        try:
            run(picks)
        except _Drift as drift:
            wrong.append(str(drift))
            raise

    try:
        interleaved()
    except (_Drift, Flaky):
        # Where the environment remembers across episodes not even the same interleaving goes the same way twice.
        return wrong[-1]
    return None


CHECKS = (
    Check(
        id="runtime.episode_isolation",
        asks="episodes interleaved at random give what they give one by one",
        why="a host plays hundreds of episodes at once; what one leaves behind changes the others' rewards",
        mend="keep what an episode remembers in its `State`, never in the module, the plugin, `shared` or a cache "
        "whose key two episodes can have in common",
        look=_look,
        needs=("hypothesis",),
    ),
)
