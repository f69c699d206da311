"""Check that replaying a transcript rebuilds its state and its verdict."""

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
"""How many tasks are played, by the oracle and at random."""


async def _check_replay(subject: Subject) -> list[Finding]:
    findings = []
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=6)
        for script in await build_scripts(subject, environment, tasks=tasks):
            async with subject.enter_environment() as other:
                if change := await _find_difference(environment, other, script):
                    findings.append(Finding(seen=f"{script.title}, replayed in a new environment: {change}"))
    return findings


async def _find_difference(environment: Environment, other: Environment, script: Script) -> str | None:
    first = Performance(script, environment)
    try:
        episode = await first.play_until_verdict()
        state = to_plain(episode.state) if episode else None
        phase = await first.advance()
    finally:
        await first.close()
    if episode is None or phase != "verify" or first.rollout.verdict is None:
        # Other checks report a broken episode; there is nothing to replay.
        return None
    if len(list(iter_turn_spans(episode.transcript.items))) < len(first.answers):
        # A step without an answer leaves two replies in a row, which a transcript cannot tell apart.
        return None
    return find_difference(
        {"state": state, "verdict": serialize_verdict(first.rollout.verdict)}, await _rebuild_episode(other, episode)
    )


async def _rebuild_episode(other: Environment, episode: Episode) -> Plain:
    """Return the state and the verdict of *episode*'s transcript, replayed in an *other* environment."""
    replayed = await other.replay(episode.task, episode.transcript.items, seed=episode.seed)
    replayed.transcript.ended = episode.transcript.ended
    try:
        return {"state": to_plain(replayed.state), "verdict": serialize_verdict(await other.verify(replayed))}
    finally:
        # Another check reports errors of `close`.
        with suppress(EpisodeError):
            await other.close(replayed)


CHECKS = (
    Check(
        id="semantic.replayability",
        asks="replaying a transcript rebuilds the same state and the same verdict",
        why="trainers send transcripts to be graded without the episode; the host rebuilds its state by replaying "
        "the calls",
        mend="let `reset` and `step` depend on the task, the seed and the actions alone, and keep everything that "
        "`verify` needs in the state or the transcript",
        run=_check_replay,
    ),
)
