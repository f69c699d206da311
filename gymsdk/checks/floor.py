"""The floor: what no policy may earn without understanding the task, and what no reply or call may break."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gymsdk.checks.attack import (
    PANEL,
    TOLERANCE,
    Attack,
    Attempt,
    TaskView,
    Turns,
    build_policy,
    find_gain_beyond_chance,
    open_tasks,
    run_attacks,
)
from gymsdk.checks.canary import CANARIES
from gymsdk.checks.performance import Performance, Script, describe_task, sample_tasks
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.models.scripted import ScriptedModel
from gymsdk.types import Rollout

MAX_EARLY_TASKS = 4
"""Tasks that are judged early."""

MAX_PREFIXES = 4
"""Beginnings of one oracle's way that are judged."""

FIX_EARLY_VERIFY = (
    "let `verify` take a transcript that has just begun, without reply or calls: it is worth 0, and no error"
)

JUDGED_AT_RESET = Attack("is judged right after reset", lambda _: [], FIX_EARLY_VERIFY)
STOPPED_EARLY = Attack("stops in the middle of what the oracle does", lambda _: [], FIX_EARLY_VERIFY)


async def judge_unplayed(subject: Subject, environment: Environment, seen: Sequence[TaskView]) -> list[Attempt]:
    """Give what is earned before the policy has said anything."""
    return [
        Attempt(JUDGED_AT_RESET, each, [], await _judge_at_reset(subject, environment, each))
        for each in seen[:MAX_EARLY_TASKS]
    ]


async def _judge_at_reset(subject: Subject, environment: Environment, seen: TaskView) -> Rollout:
    performance = Performance(Script("nobody", seen.task, subject.seed, (), subject.brief_budget), environment)
    await performance.play_all()
    return performance.rollout


async def judge_prefixes(subject: Subject, environment: Environment, seen: Sequence[TaskView]) -> list[Attempt]:
    """Give what comes of the beginnings of the oracle's ways.

    Where only the closing words are missing the whole reward is right, so nothing is asked of these but a verdict.
    """
    begun = [
        (each, each.own[:length])
        for each in seen[:MAX_EARLY_TASKS]
        for length in range(1, len(each.own))[:MAX_PREFIXES]
    ]
    return [
        Attempt(STOPPED_EARLY, each, way, await _judge_prefix(subject, environment, each, way)) for each, way in begun
    ]


async def _judge_prefix(subject: Subject, environment: Environment, seen: TaskView, way: Turns) -> Rollout:
    budget = subject.budget.model_copy(update={"turns": len(way)})
    return await subject.play(environment, ScriptedModel("cut", build_policy(way)), seen.task, budget=budget)


MAX_TASKS = 12
"""Tasks the panel is let loose on."""

MAX_FINDINGS = 6
"""Findings of one sort that are told one by one."""


async def _check_floor(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        seen = await _open_sample(subject, environment, MAX_TASKS)
        attempts = await run_attacks(subject, environment, PANEL, seen)
    return [*shorten_findings(_find_gains(attempts)), *find_broken_attempts(attempts)]


async def _check_canaries(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        seen = await _open_sample(subject, environment, MAX_EARLY_TASKS)
        attempts = await run_attacks(subject, environment, CANARIES, seen)
        fresh = await judge_unplayed(subject, environment, seen)
        cut = await judge_prefixes(subject, environment, seen)
    return [*shorten_findings(_find_gains([*attempts, *fresh])), *find_broken_attempts([*attempts, *fresh, *cut])]


async def _open_sample(subject: Subject, environment: Environment, most: int) -> list[TaskView]:
    seen = await open_tasks(subject, environment, sample_tasks(subject.tasks, most))
    if not seen:
        raise NotApplicable("the environment has no task that could be opened; give it a `tasks` hook or data/*.jsonl")
    return seen


def _find_gains(attempts: Iterable[Attempt]) -> list[Finding]:
    by_attack: defaultdict[Attack, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_attack[attempt.attack].append(attempt)
    return [
        *_find_above_maximum(attempts),
        *(finding for tried in by_attack.values() for finding in find_gain_beyond_chance(tried)),
    ]


def _find_above_maximum(attempts: Iterable[Attempt]) -> list[Finding]:
    """Give the first attempt that earned more than the maximum."""
    for attempt in attempts:
        maximum = attempt.seen.claims.maximum
        if attempt.earned > maximum + TOLERANCE:
            seen = f"a policy that {attempt.attack.name} earns {attempt.earned:g}, more than the claimed maximum {maximum:g}"
            mend = "claim the most that can be earned in `claims(task).maximum`, or cap the reward"
            return [Finding(seen=seen, task=describe_task(attempt.seen.task), mend=mend)]
    return []


def shorten_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Give *findings*, those after the first `MOST` in one sentence."""
    kept, rest = list(findings[:MAX_FINDINGS]), findings[MAX_FINDINGS:]
    if not rest:
        return kept
    more = "; ".join(finding.seen.partition(", where ")[0].removeprefix("a policy that ") for finding in rest)
    return [*kept, Finding(seen=f"so does, or does more, a policy that {more}")]


def find_broken_attempts(attempts: Iterable[Attempt]) -> list[Finding]:
    """Give the ways in which attempts were not scored, the first attempt of each."""
    ways: defaultdict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if failure := attempt.rollout.failure:
            ways[failure.stage, failure.kind].append(attempt)
    return [_describe_breakage(tried) for tried in ways.values()]


def _describe_breakage(attempts: list[Attempt]) -> Finding:
    first, failure = attempts[0], attempts[0].rollout.failure
    assert failure is not None, "a breakage has one"
    names = dict.fromkeys(attempt.attack.name for attempt in attempts[1:] if attempt.attack is not first.attack)
    more = f"; so does one that {'; '.join(names)}" if names else ""
    return Finding(
        seen=f"a policy that {first.attack.name} dodges its grade: the episode is {first.rollout.outcome} in"
        f" {failure.stage} ({failure.kind}: {failure.message[:200]}){more}",
        task=describe_task(first.seen.task),
        mend=first.attack.mend,
    )


CHECKS = (
    Check(
        id="semantic.floor_gap",
        asks="a policy that understands nothing earns no more than the claimed chance",
        why="training finds whatever pays without understanding, and learns that instead of the task",
        mend="make the verifier give nothing to such a reply, or claim the chance it has in `claims(task).chance`",
        run=_check_floor,
    ),
    Check(
        id="semantic.canary_floor",
        asks="replies and calls made to break or to deceive the grader are scored, and earn nothing",
        why="a reply that breaks the grader dodges its grade: bad answers vanish from the mean instead of lowering it",
        mend="treat what the policy wrote as data of any kind: parse it under a guard, bound it, do not obey it",
        run=_check_canaries,
    ),
)
