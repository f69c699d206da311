"""The verifier: asked again about the same transcript it gives the same verdict, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from gymsdk import responses, wire
from gymsdk.checks.attack import Turns, named, played, sample, script
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.panel import one_form
from gymsdk.checks.performance import difference, plain, verdict
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.episode import request_of
from gymsdk.errors import EpisodeError
from gymsdk.models.scripted import Scripted
from gymsdk.outcome import Rollout
from gymsdk.sitting import Sitting
from gymsdk.types import Episode, Playable, Task

TASKS = 4
"""Tasks whose transcripts are judged again."""

PURE = "let `verify` only read: copy what it sorts, fills or pops, and keep counters in the verdict"
FIXED = "take chance, the clock and counters out of `verify`; seed what it draws by the task"
APART = "let `verify` depend on nothing but its arguments: no module variables, no cache that changes an answer"

WRONG = [[wire.message(one_form("17"), id="msg_0")]]
"""A reply that is hardly ever right."""


async def _look(subject: Subject) -> list[Finding]:
    # Drawn anew: a verifier that changes its task may have done so in an earlier check.
    tasks = sample(replace(subject).tasks, TASKS)
    if not tasks:
        raise NotApplicable("the environment has no tasks")
    async with subject.fresh() as environment, subject.fresh() as other:
        plays = [each for task in tasks for each in await _plays(subject, environment, task)]
        if not plays:
            raise NotApplicable("no play of a task came to a verdict, so there is none to ask for again")
        found = [await _judged_again(subject, environment, other, *play) for play in plays]
    return _each_once([finding for finding in found if finding])


async def _plays(subject: Subject, environment: Environment, task: Task) -> list[tuple[Task, Turns, Rollout]]:
    """Give a right and a wrong way to play *task* that come to a verdict, as far as they are known."""
    right = await subject.oracle(environment, task.model_copy(deep=True))
    wrong = await subject.told(environment, played(WRONG), task.model_copy(deep=True))
    ways = ((script(right), right), (WRONG, wrong))
    return [(task, way, rollout) for way, rollout in ways if way and rollout.outcome == "scored"]


async def _judged_again(
    subject: Subject, environment: Environment, other: Environment, task: Task, way: Turns, play: Rollout
) -> Finding | None:
    name = named(task)
    async with _unjudged(subject, environment, task.model_copy(deep=True), way) as episode:
        if episode is None:
            return None
        before, copies = _all(episode), [_copy(episode, each) for each in (environment, environment, other)]
        first = await _asked(environment, episode)
        if changed := difference(before, _all(episode)):
            return Finding(seen=f"`verify` changes what it is given: {changed}", task=name, mend=PURE)
        again, once_more, anew = [await _asked(copy.environment, copy) for copy in copies]
    verdicts = {
        "when it is asked again about one transcript": (first, again, FIXED),
        "when it is asked a third time about one transcript": (again, once_more, FIXED),
        "between two plays of the same turns": (verdict(play.verdict), first, APART),
        "between two environments that are asked about one transcript": (first, anew, APART),
    }
    return _first_difference(name, verdicts)


def _first_difference(task: str, verdicts: dict[str, tuple[Any, Any, str]]) -> Finding | None:
    for when, (one, another, mend) in verdicts.items():
        if differs := difference(one, another):
            return Finding(seen=f"the verdict changes {when}: {differs}", task=task, mend=mend)
    return None


@asynccontextmanager
async def _unjudged(
    subject: Subject, environment: Environment, task: Task, way: Turns
) -> AsyncIterator[Episode | None]:
    """Play *way* and hold before the verdict; `None` where it does not come to one."""
    sitting, model = Sitting(environment, subject.budget), Scripted("again", played(way))
    try:
        episode = await sitting.open(task, seed=subject.seed)
        while not sitting.over:
            await sitting.answer(await responses.asked(model, request_of(episode, {}), episode=episode))
    except EpisodeError:
        # What cannot be played is the affair of the checks that play it.
        yield None
    else:
        yield episode
    finally:
        await sitting.close()


async def _asked(environment: Playable, episode: Episode) -> Any:
    try:
        return verdict(await environment.verify(episode))
    except EpisodeError as error:
        return {"failure": f"{error.kind}: {error}"}


def _copy(episode: Episode, environment: Environment) -> Episode:
    state, transcript = deepcopy(episode.state), deepcopy(episode.transcript)
    task = episode.task.model_copy(deep=True)
    return replace(episode, environment=environment, state=state, transcript=transcript, task=task)


def _all(episode: Episode) -> Any:
    """Give everything `verify` could change, as plain JSON."""
    transcript = episode.transcript
    return {
        "state": plain(episode.state.model_dump() | (episode.state.__pydantic_private__ or {})),
        "transcript": plain([transcript.opening, transcript.items, transcript.ended]),
        "task": plain(episode.task.model_dump()),
        "row": plain(episode.row),
    }


def _each_once(findings: list[Finding]) -> list[Finding]:
    """Give the first finding of each sort."""
    return list({finding.mend: finding for finding in reversed(findings)}.values())


CHECKS = (
    Check(
        id="semantic.verifier_determinism",
        asks="`verify` judges one transcript always alike, and changes nothing that it is given",
        why="a reward that changes when nothing has changed is noise to train on, and no result can be checked again",
        mend=FIXED,
        look=_look,
    ),
)
