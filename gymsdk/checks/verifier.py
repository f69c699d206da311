"""Check that `verify` always gives the same verdict for a transcript and changes nothing that it receives."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from gymsdk import responses
from gymsdk.checks.attack import build_policy, format_answer
from gymsdk.checks.performance import Performance, Script, describe_task, sample_tasks, serialize_verdict
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Plain, Play, RecordingModel, Subject, find_difference, to_plain
from gymsdk.environment import Environment
from gymsdk.episode import Budget
from gymsdk.errors import EpisodeError
from gymsdk.models.scripted import ScriptedModel
from gymsdk.types import Episode, Playable, Task

MAX_TASKS = 4
"""How many tasks have their transcripts judged again."""

FIX_MUTATION = "let `verify` only read: copy what it sorts, fills or pops, and keep counters in the verdict"
FIX_RANDOMNESS = "use no randomness, clock or counters in `verify`; seed its random choices by the task"
FIX_SHARED_STATE = (
    "let `verify` depend on nothing but its arguments: no module variables, no cache that changes an answer"
)

WRONG_TURNS = [[responses.build_message(format_answer("17"), id="msg_0")]]
"""A reply that is hardly ever right."""


async def _check_verifier(subject: Subject) -> list[Finding]:
    # Draw new tasks: a verifier that changes its task may have changed these in an earlier check.
    redrawn = replace(subject)
    async with subject.enter_environment() as environment, subject.enter_environment() as other:
        tasks = sample_tasks(redrawn.tasks, await subject.count_affordable(environment, MAX_TASKS, each=4))
        if not tasks:
            raise NotApplicable("the environment has no tasks")
        plays = [each for task in tasks for each in await _play_right_and_wrong(subject, environment, task)]
        if not plays:
            raise NotApplicable("no play of a task was scored, so there is no verdict to compare")
        findings = [await _judge_repeatedly(subject, environment, other, *play) for play in plays]
    return _deduplicate_findings([finding for finding in findings if finding])


async def _play_right_and_wrong(
    subject: Subject, environment: Environment, task: Task
) -> list[tuple[Task, Play, Budget]]:
    """Return the scored ones of a right and a wrong play of *task*."""
    right = await subject.play_oracle(environment, task.model_copy(deep=True))
    model = RecordingModel(ScriptedModel("wrong", build_policy(WRONG_TURNS)))
    rollout = await subject.play(environment, model, task.model_copy(deep=True), budget=subject.brief_budget)
    plays = ((right, subject.budget), (Play(tuple(model.turns), rollout), subject.brief_budget))
    return [(task, play, budget) for play, budget in plays if play.rollout.outcome == "scored"]


async def _judge_repeatedly(
    subject: Subject, environment: Environment, other: Environment, task: Task, play: Play, budget: Budget
) -> Finding | None:
    script = Script("again", task.model_copy(deep=True), subject.seed, play.turns, budget)
    performance = Performance(script, environment)
    try:
        episode = await performance.play_until_verdict()
        # Other checks report tasks that cannot be played.
        return (
            await _find_change(environment, other, episode, serialize_verdict(play.rollout.verdict))
            if episode
            else None
        )
    finally:
        await performance.close()


async def _find_change(environment: Environment, other: Environment, episode: Episode, played: Plain) -> Finding | None:
    """Return what changes in *episode* or in its verdict when `verify` judges it repeatedly."""
    name = describe_task(episode.task)
    before, copies = (
        _dump_episode(episode),
        [_copy_episode(episode, each) for each in (environment, environment, other)],
    )
    first = await _ask_verify(environment, episode)
    if changed := find_difference(before, _dump_episode(episode)):
        return Finding(seen=f"`verify` changes its arguments: {changed}", task=name, mend=FIX_MUTATION)
    again, once_more, anew = [await _ask_verify(copy.environment, copy) for copy in copies]
    verdicts = {
        "when one transcript is judged again": (first, again, FIX_RANDOMNESS),
        "when one transcript is judged a third time": (again, once_more, FIX_RANDOMNESS),
        "between two plays of the same turns": (played, first, FIX_SHARED_STATE),
        "between two environments that judge one transcript": (first, anew, FIX_SHARED_STATE),
    }
    return _find_verdict_difference(name, verdicts)


def _find_verdict_difference(task: str, verdicts: dict[str, tuple[Plain, Plain, str]]) -> Finding | None:
    for when, (first, another, fix) in verdicts.items():
        if differs := find_difference(first, another):
            return Finding(seen=f"the verdict changes {when}: {differs}", task=task, mend=fix)
    return None


async def _ask_verify(environment: Playable, episode: Episode) -> Plain:
    try:
        return serialize_verdict(await environment.verify(episode))
    except EpisodeError as error:
        return {"failure": f"{error.kind}: {error}"}


def _copy_episode(episode: Episode, environment: Environment) -> Episode:
    try:
        state, transcript = deepcopy(episode.state), deepcopy(episode.transcript)
    except Exception:  # noqa: BLE001  # an author's state may hold anything
        raise NotApplicable("its state cannot be copied, so it cannot be judged twice") from None
    task = episode.task.model_copy(deep=True)
    return replace(episode, environment=environment, state=state, transcript=transcript, task=task)


def _dump_episode(episode: Episode) -> Plain:
    """Return everything that `verify` could change, as plain JSON."""
    transcript = episode.transcript
    return {
        "state": to_plain(dict(episode.state) | (episode.state.__pydantic_private__ or {})),
        "transcript": to_plain([transcript.opening, transcript.items, transcript.ended]),
        "task": to_plain(episode.task),
        "row": to_plain(episode.row),
    }


def _deduplicate_findings(findings: list[Finding]) -> list[Finding]:
    """Return the first finding of each kind."""
    return list({finding.mend: finding for finding in reversed(findings)}.values())


CHECKS = (
    Check(
        id="semantic.verifier_determinism",
        asks="`verify` gives the same verdict for the same transcript, and changes nothing that it receives",
        why="a reward that changes without a reason is noise in training, and no result can be reproduced",
        mend=FIX_RANDOMNESS,
        run=_check_verifier,
    ),
)
