"""The verifier: asked again about the same transcript it gives the same verdict, and leaves everything as it was."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from gymsdk import wire
from gymsdk.checks.attack import played
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.panel import one_form
from gymsdk.checks.performance import Performance, Script, verdict
from gymsdk.checks.plain import Plain, difference, plain
from gymsdk.checks.subject import Play, Recorded, Subject
from gymsdk.checks.tasks import named, sample
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.models.scripted import Scripted
from gymsdk.sitting import Budget
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
    anew = replace(subject)
    async with subject.enter_environment() as environment, subject.enter_environment() as other:
        tasks = sample(anew.tasks, await subject.count_affordable(environment, TASKS, each=4))
        if not tasks:
            raise NotApplicable("the environment has no tasks")
        plays = [each for task in tasks for each in await _plays(subject, environment, task)]
        if not plays:
            raise NotApplicable("no play of a task came to a verdict, so there is none to ask for again")
        found = [await _judged_again(subject, environment, other, *play) for play in plays]
    return _each_once([finding for finding in found if finding])


async def _plays(subject: Subject, environment: Environment, task: Task) -> list[tuple[Task, Play, Budget]]:
    """Give a right and a wrong play of *task* that come to a verdict, as far as they are known."""
    right = await subject.play_oracle(environment, task.model_copy(deep=True))
    model = Recorded(Scripted("wrong", played(WRONG)))
    rollout = await subject.play(environment, model, task.model_copy(deep=True), budget=subject.brief_budget)
    plays = ((right, subject.budget), (Play(tuple(model.turns), rollout), subject.brief_budget))
    return [(task, play, budget) for play, budget in plays if play.rollout.outcome == "scored"]


async def _judged_again(
    subject: Subject, environment: Environment, other: Environment, task: Task, play: Play, budget: Budget
) -> Finding | None:
    script = Script("again", task.model_copy(deep=True), subject.seed, play.turns, budget)
    performance = Performance(script, environment)
    try:
        episode = await performance.play_until_verdict()
        # What cannot be played is the affair of the checks that play it.
        return await _changing(environment, other, episode, verdict(play.rollout.verdict)) if episode else None
    finally:
        await performance.close()


async def _changing(environment: Environment, other: Environment, episode: Episode, played: Plain) -> Finding | None:
    """Give what changes about *episode*, or about its verdict, while `verify` is asked again and again."""
    name = named(episode.task)
    before, copies = _all(episode), [_copy(episode, each) for each in (environment, environment, other)]
    first = await _asked(environment, episode)
    if changed := difference(before, _all(episode)):
        return Finding(seen=f"`verify` changes what it is given: {changed}", task=name, mend=PURE)
    again, once_more, anew = [await _asked(copy.environment, copy) for copy in copies]
    verdicts = {
        "when it is asked again about one transcript": (first, again, FIXED),
        "when it is asked a third time about one transcript": (again, once_more, FIXED),
        "between two plays of the same turns": (played, first, APART),
        "between two environments that are asked about one transcript": (first, anew, APART),
    }
    return _first_difference(name, verdicts)


def _first_difference(task: str, verdicts: dict[str, tuple[Plain, Plain, str]]) -> Finding | None:
    for when, (one, another, mend) in verdicts.items():
        if differs := difference(one, another):
            return Finding(seen=f"the verdict changes {when}: {differs}", task=task, mend=mend)
    return None


async def _asked(environment: Playable, episode: Episode) -> Plain:
    try:
        return verdict(await environment.verify(episode))
    except EpisodeError as error:
        return {"failure": f"{error.kind}: {error}"}


def _copy(episode: Episode, environment: Environment) -> Episode:
    try:
        state, transcript = deepcopy(episode.state), deepcopy(episode.transcript)
    except Exception:  # noqa: BLE001  # an author's state may hold anything
        raise NotApplicable("its state cannot be copied, so no verdict can be asked for twice") from None
    task = episode.task.model_copy(deep=True)
    return replace(episode, environment=environment, state=state, transcript=transcript, task=task)


def _all(episode: Episode) -> Plain:
    """Give everything `verify` could change, as plain JSON."""
    transcript = episode.transcript
    return {
        "state": plain(dict(episode.state) | (episode.state.__pydantic_private__ or {})),
        "transcript": plain([transcript.opening, transcript.items, transcript.ended]),
        "task": plain(episode.task),
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
        run=_look,
    ),
)
