"""Replay: a transcript played again rebuilds the state it left and the verdict it had."""

from __future__ import annotations

from contextlib import suppress

from gymsdk.checks.performance import Performance, Script, build_scripts, serialize_verdict
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Plain, Subject, find_difference, to_plain
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.responses import iter_turn_spans
from gymsdk.types import Episode

MAX_TASKS = 3
"""Tasks that are played, by the oracle and at random."""


async def _check_replay(subject: Subject) -> list[Finding]:
    findings = []
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=6)
        for script in await build_scripts(subject, environment, tasks=tasks):
            async with subject.enter_environment() as other:
                if seen := await _find_difference(environment, other, script):
                    findings.append(Finding(seen=f"{script.title}, replayed in a new environment: {seen}"))
    return findings


async def _find_difference(environment: Environment, other: Environment, script: Script) -> str | None:
    first = Performance(script, environment)
    try:
        episode = await first.play_until_verdict()
        left = to_plain(episode.state) if episode else None
        judged = await first.advance()
    finally:
        await first.close()
    if episode is None or judged != "verify" or first.rollout.verdict is None:
        # What breaks an episode is for other checks; there is nothing to replay.
        return None
    if len(list(iter_turn_spans(episode.transcript.items))) < len(first.answers):
        # Where a step says nothing two replies stand side by side, and a transcript does not tell them apart.
        return None
    return find_difference(
        {"state": left, "verdict": serialize_verdict(first.rollout.verdict)}, await _rebuild_episode(other, episode)
    )


async def _rebuild_episode(other: Environment, episode: Episode) -> Plain:
    """Give the state and the verdict that *episode*'s transcript leads to in an *other* environment."""
    again = await other.replay(episode.task, episode.transcript.items, seed=episode.seed)
    again.transcript.ended = episode.transcript.ended
    try:
        return {"state": to_plain(again.state), "verdict": serialize_verdict(await other.verify(again))}
    finally:
        # How closing goes is for another check.
        with suppress(EpisodeError):
            await other.close(again)


CHECKS = (
    Check(
        id="semantic.replayability",
        asks="a transcript played again rebuilds the same state and the same verdict",
        why="trainers send transcripts to be graded without the episode that made them; the host rebuilds its state by "
        "playing the calls again",
        mend="let `reset` and `step` depend on the task, the seed and the actions alone, and keep all that `verify` "
        "needs in the state or the transcript",
        run=_check_replay,
    ),
)
