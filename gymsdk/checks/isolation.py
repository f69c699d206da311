"""Check that interleaved and concurrent episodes give the same results as sequential ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gymsdk.checks.phases import Observations, Performance, Script, build_scripts
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import TIME_SHARE, Subject, find_difference
from gymsdk.environment import Environment

if TYPE_CHECKING:
    from hypothesis import settings

MAX_EXAMPLES = 15
"""How many interleavings are tried."""

MAX_TASKS = 3
"""How many tasks are played, by the oracle and at random; the first one twice."""

MAX_PHASES = 12
"""How many steps of an interleaving a finding prints."""


class _DifferenceError(AssertionError):
    """An interleaved episode differed from the sequential one; the message says where, and after which steps."""


@dataclass(slots=True)
class _Comparison:
    """The scripts to interleave, and what to compare their results with.

    Attributes:
        environment: The environment.
        scripts: The scripts.
        sequential: The results of each script, played alone.
        deadline: When the last episode must end, on the clock of `time.monotonic`.
        stopped: Set if no more episodes may be played.
    """

    environment: Environment
    scripts: Sequence[Script]
    sequential: Sequence[Observations]
    deadline: float
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """Whether no more episodes may be played."""
        return self.stopped.is_set() or time.monotonic() >= self.deadline


async def _check_isolation(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, episodes=8)
        scripts = await build_scripts(subject, environment, tasks=tasks)
        # The first task twice: two episodes of one task may share the key of a cache.
        scripts = [*scripts, *scripts[:1]]
        examples = await subject.count_affordable(environment, MAX_EXAMPLES, episodes=len(scripts), least=2)
        sequential = [await Performance(script, environment).play_all() for script in scripts]
        comparison = _Comparison(environment, scripts, sequential, time.monotonic() + TIME_SHARE * subject.seconds_left)
        return await _check_concurrent(comparison) or await _check_interleaved(comparison, examples)


async def _check_concurrent(comparison: _Comparison) -> list[Finding]:
    plays = [Performance(script, comparison.environment) for script in (*comparison.scripts, *comparison.scripts)]
    await asyncio.gather(*(play.play_all() for play in plays))
    for play, expected in zip(plays, [*comparison.sequential, *comparison.sequential], strict=True):
        if change := find_difference(expected, play.observations):
            return [Finding(problem=f"{play.script.title}, played beside {len(plays) - 1} others: {change}")]
    return []


async def _check_interleaved(comparison: _Comparison, examples: int) -> list[Finding]:
    loop = asyncio.get_running_loop()

    def run(picks: list[int]) -> None:
        """Play one interleaving, unless the time is up: this thread cannot be interrupted."""
        if comparison.is_over:
            return
        playing = asyncio.run_coroutine_threadsafe(_play_interleaving(comparison, picks), loop)
        try:
            playing.result(max(0.0, comparison.deadline - time.monotonic()))
        except (TimeoutError, CancelledError):
            comparison.stopped.set()
            playing.cancel()

    try:
        difference = await asyncio.to_thread(_find_smallest_difference, run, len(comparison.scripts), examples)
    finally:
        comparison.stopped.set()
    return [Finding(problem=difference)] if difference else []


async def _play_interleaving(comparison: _Comparison, picks: Sequence[int]) -> None:
    """Play the next phase of each picked script in turn, then finish all. Raises `_DifferenceError` on a difference."""
    plays = [Performance(script, comparison.environment) for script in comparison.scripts]
    try:
        steps = [f"{chr(ord('A') + pick)} {await plays[pick].advance()}" for pick in picks if not plays[pick].is_closed]
        observed = [await play.play_all() for play in plays]
    finally:
        for play in plays:
            await play.close()
    for play, expected, got in zip(plays, comparison.sequential, observed, strict=True):
        if change := find_difference(expected, got):
            order = ", ".join(steps[:MAX_PHASES]) + (", …" if len(steps) > MAX_PHASES else "")
            raise _DifferenceError(
                f"{play.script.title}, after the interleaved steps [{order}] of several episodes: {change}"
            )


def _find_smallest_difference(run: Callable[[list[int]], None], count: int, examples: int) -> str | None:
    """Return the difference that the smallest failing interleaving shows, or `None` if none fails."""
    from hypothesis import given
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky

    differences: list[str] = []

    @_build_hypothesis_settings(examples)
    @given(st.lists(st.integers(0, count - 1), min_size=4, max_size=6 * count))
    def interleaved(picks: list[int]) -> None:
        try:
            run(picks)
        except _DifferenceError as difference:
            differences.append(str(difference))
            raise

    try:
        interleaved()
    except (_DifferenceError, Flaky):
        # If the environment keeps state across episodes, even the same interleaving gives different results.
        return differences[-1]
    return None


def _build_hypothesis_settings(examples: int) -> settings:
    """Return settings of hypothesis for *examples* examples: deterministic, quiet and without a database."""
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
        requirement="episodes interleaved at random give the same results as sequential ones",
        why="a host plays hundreds of episodes at once; state that one leaves behind changes the rewards of others",
        fix="keep the state of an episode in its `State`, never in the module, the plugin, `shared` or a cache "
        "whose key two episodes can share",
        run=_check_isolation,
        needs=("hypothesis",),
    ),
)
