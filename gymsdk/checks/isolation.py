"""Isolation: episodes interleaved at random, and side by side, give what they give one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gymsdk.checks.performance import Observations, Performance, Script, build_scripts
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import TIME_SHARE, Subject, find_difference
from gymsdk.environment import Environment
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from hypothesis import settings

MAX_EXAMPLES = 15
"""Interleavings that are tried."""

MAX_TASKS = 3
"""Tasks that are played, by the oracle and at random; the first one twice."""

MAX_PHASES = 12
"""Steps of an interleaving that a finding prints."""


class _Drift(AssertionError):
    """An interleaved episode went otherwise than alone; the message says where, and after what."""


@dataclass(slots=True)
class _Stage:
    """The episodes that are interleaved: what each of *played* gave *alone*, until when they may be played."""

    environment: Environment
    played: Sequence[Script]
    alone: Sequence[Observations]
    ends: float
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be played."""
        return self.over.is_set() or time.monotonic() >= self.ends


async def _check_isolation(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=8)
        played = await build_scripts(subject, environment, tasks=tasks)
        played = [*played, *played[:1]]
        examples = await subject.count_affordable(environment, MAX_EXAMPLES, each=len(played), least=2)
        alone = [await Performance(script, environment).play_all() for script in played]
        stage = _Stage(environment, played, alone, time.monotonic() + TIME_SHARE * subject.seconds_left)
        return await _check_concurrent(stage) or await _check_interleaved(stage, examples)


async def _check_concurrent(stage: _Stage) -> list[Finding]:
    plays = [Performance(script, stage.environment) for script in (*stage.played, *stage.played)]
    await asyncio.gather(*(each.play_all() for each in plays))
    for each, expected in zip(plays, [*stage.alone, *stage.alone], strict=True):
        if found := find_difference(expected, each.seen):
            return [Finding(seen=f"{each.script.title}, played beside {len(plays) - 1} others: {found}")]
    return []


async def _check_interleaved(stage: _Stage, examples: int) -> list[Finding]:
    loop = asyncio.get_running_loop()

    def run(picks: list[int]) -> None:
        """Play one interleaving, and none any more where the time is over: nobody could stop this thread."""
        if stage.closed:
            return
        playing = asyncio.run_coroutine_threadsafe(_play_interleaving(stage, picks), loop)
        try:
            playing.result(max(0.0, stage.ends - time.monotonic()))
        except (TimeoutError, CancelledError):
            stage.over.set()
            playing.cancel()

    try:
        found = await asyncio.to_thread(_shrink, run, len(stage.played), examples)
    finally:
        stage.over.set()
    return [Finding(seen=found)] if found else []


async def _play_interleaving(stage: _Stage, picks: Sequence[int]) -> None:
    """Play all, the next phase of a picked one at a time, then the rest one by one; raises `_Drift`."""
    plays = [Performance(script, stage.environment) for script in stage.played]
    try:
        steps = [f"{chr(ord('A') + pick)} {await plays[pick].advance()}" for pick in picks if not plays[pick].over]
        seen = [await each.play_all() for each in plays]
    finally:
        for each in plays:
            await each.close()
    for each, expected, got in zip(plays, stage.alone, seen, strict=True):
        if found := find_difference(expected, got):
            order = ", ".join(steps[:MAX_PHASES]) + (", …" if len(steps) > MAX_PHASES else "")
            raise _Drift(f"{each.script.title}, after the interleaved steps [{order}] of several episodes: {found}")


def _shrink(run: Callable[[list[int]], None], count: int, examples: int) -> str | None:
    """Give what the smallest interleaving that goes wrong shows, `None` where none does."""
    try:
        from hypothesis import given
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky
    except ImportError:
        raise UsageError('this check draws with hypothesis; run: pip install "gymsdk[author]"') from None
    wrong: list[str] = []

    @_build_hypothesis_settings(examples)
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


def _build_hypothesis_settings(examples: int) -> settings:
    """Give hypothesis' settings for so many *examples*: nothing kept, nothing left to chance, nothing said."""
    from hypothesis import HealthCheck, Phase, Verbosity, settings

    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )


CHECKS = (
    Check(
        id="runtime.episode_isolation",
        asks="episodes interleaved at random give what they give one by one",
        why="a host plays hundreds of episodes at once; what one leaves behind changes the others' rewards",
        mend="keep what an episode remembers in its `State`, never in the module, the plugin, `shared` or a cache "
        "whose key two episodes can have in common",
        run=_check_isolation,
        needs=("hypothesis",),
    ),
)
