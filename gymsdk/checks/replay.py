"""Replay: a transcript played again rebuilds the state it left and the verdict it had."""

from __future__ import annotations

from contextlib import suppress

from gymsdk.checks.check import Check, Finding
from gymsdk.checks.performance import Script, difference, scripts, state, verdict
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.sitting import Sitting
from gymsdk.wire import response

TASKS = 3
"""Tasks that are played, by the oracle and at random."""


async def _look(subject: Subject) -> list[Finding]:
    findings = []
    async with subject.fresh() as environment:
        for script in await scripts(subject, environment, tasks=TASKS):
            async with subject.fresh() as other:
                if seen := await _difference(subject, environment, other, script):
                    findings.append(Finding(seen=f"{script.title}, replayed in a new environment: {seen}"))
    return findings


async def _difference(subject: Subject, environment: Environment, other: Environment, script: Script) -> str | None:
    sitting = Sitting(environment, subject.budget)
    try:
        episode = await sitting.open(script.task, seed=script.seed)
        for turn in script.turns:
            if not sitting.over:
                await sitting.answer(response(list(turn), model="script"))
        left = state(episode.state)
        await sitting.judge()
    except EpisodeError:
        # What breaks an episode is for other checks; there is nothing to replay.
        return None
    finally:
        await sitting.close()
    again = await other.replay(script.task, episode.transcript.items, seed=script.seed)
    again.transcript.ended = episode.transcript.ended
    try:
        rebuilt = state(again.state)
        judged = await other.verify(again)
    finally:
        # How closing goes is for another check.
        with suppress(EpisodeError):
            await other.close(again)
    return difference(
        {"state": left, "verdict": verdict(sitting.ending)}, {"state": rebuilt, "verdict": verdict(judged)}
    )


CHECKS = (
    Check(
        id="semantic.replayability",
        asks="a transcript played again rebuilds the same state and the same verdict",
        why="trainers send transcripts to be graded without the episode that made them; the host rebuilds its state by "
        "playing the calls again",
        mend="let `reset` and `step` depend on the task, the seed and the actions alone, and keep all that `verify` "
        "needs in the state or the transcript",
        look=_look,
    ),
)
