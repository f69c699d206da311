"""Check that policies without understanding earn nothing, and that no reply or call breaks the grader."""

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
"""How many tasks are judged early."""

MAX_PREFIXES = 4
"""How many prefixes of one oracle's play are judged."""

FIX_EARLY_VERIFY = "let `verify` accept a transcript without a reply or calls: its reward is 0, and it is not an error"
JUDGED_AT_RESET = Attack("is judged right after reset", lambda _: [], FIX_EARLY_VERIFY)
STOPPED_EARLY = Attack("stops in the middle of what the oracle does", lambda _: [], FIX_EARLY_VERIFY)

MAX_TASKS = 12
"""How many tasks the panel plays."""

MAX_FINDINGS = 6
"""How many findings of one kind are reported one by one."""


async def judge_unplayed(subject: Subject, environment: Environment, views: Sequence[TaskView]) -> list[Attempt]:
    """Judge tasks before the policy has said anything."""
    return [
        Attempt(JUDGED_AT_RESET, each, [], await _judge_at_reset(subject, environment, each))
        for each in views[:MAX_EARLY_TASKS]
    ]


async def _judge_at_reset(subject: Subject, environment: Environment, view: TaskView) -> Rollout:
    performance = Performance(Script("nobody", view.task, subject.seed, (), subject.brief_budget), environment)
    await performance.play_all()
    return performance.rollout


async def judge_prefixes(subject: Subject, environment: Environment, views: Sequence[TaskView]) -> list[Attempt]:
    """Judge the first turns of the oracle's play.

    If only the closing words are missing, the full reward is correct. So these attempts need a verdict, of any reward.
    """
    prefixes = [
        (each, each.own[:length])
        for each in views[:MAX_EARLY_TASKS]
        for length in range(1, len(each.own))[:MAX_PREFIXES]
    ]
    return [
        Attempt(STOPPED_EARLY, each, turns, await _judge_prefix(subject, environment, each, turns))
        for each, turns in prefixes
    ]


async def _judge_prefix(subject: Subject, environment: Environment, view: TaskView, turns: Turns) -> Rollout:
    budget = subject.budget.model_copy(update={"turns": len(turns)})
    return await subject.play(environment, ScriptedModel("cut", build_policy(turns)), view.task, budget=budget)


async def _check_floor(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        views = await _open_sample(subject, environment, MAX_TASKS)
        attempts = await run_attacks(subject, environment, PANEL, views)
    return [*shorten_findings(_find_gains(attempts)), *find_broken_attempts(attempts)]


async def _check_canaries(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        views = await _open_sample(subject, environment, MAX_EARLY_TASKS)
        attempts = await run_attacks(subject, environment, CANARIES, views)
        fresh = await judge_unplayed(subject, environment, views)
        cut = await judge_prefixes(subject, environment, views)
    return [*shorten_findings(_find_gains([*attempts, *fresh])), *find_broken_attempts([*attempts, *fresh, *cut])]


async def _open_sample(subject: Subject, environment: Environment, max_tasks: int) -> list[TaskView]:
    views = await open_tasks(subject, environment, sample_tasks(subject.tasks, max_tasks))
    if not views:
        raise NotApplicable("no task of the environment could be opened; give it a `tasks` hook or data/*.jsonl")
    return views


def _find_gains(attempts: Iterable[Attempt]) -> list[Finding]:
    by_attack: defaultdict[Attack, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_attack[attempt.attack].append(attempt)
    return [
        *_find_above_maximum(attempts),
        *(finding for tried in by_attack.values() for finding in find_gain_beyond_chance(tried)),
    ]


def _find_above_maximum(attempts: Iterable[Attempt]) -> list[Finding]:
    """Return the first attempt that earned more than the claimed maximum."""
    for attempt in attempts:
        maximum = attempt.seen.claims.maximum
        if attempt.earned > maximum + TOLERANCE:
            text = (
                f"a policy that {attempt.attack.name} earns {attempt.earned:g},"
                f" more than the claimed maximum {maximum:g}"
            )
            fix = "claim the highest possible reward in `claims(task).maximum`, or cap the reward"
            return [Finding(seen=text, task=describe_task(attempt.seen.task), mend=fix)]
    return []


def shorten_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return *findings* with everything after the first `MAX_FINDINGS` summarised in one finding."""
    shown, rest = list(findings[:MAX_FINDINGS]), findings[MAX_FINDINGS:]
    if not rest:
        return shown
    more = "; ".join(finding.seen.partition(", where ")[0].removeprefix("a policy that ") for finding in rest)
    return [*shown, Finding(seen=f"the same holds for a policy that {more}")]


def find_broken_attempts(attempts: Iterable[Attempt]) -> list[Finding]:
    """Return a finding for each way in which attempts were not scored, with the first attempt of each."""
    by_failure: defaultdict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if failure := attempt.rollout.failure:
            by_failure[failure.stage, failure.kind].append(attempt)
    return [_describe_breakage(tried) for tried in by_failure.values()]


def _describe_breakage(attempts: list[Attempt]) -> Finding:
    first, failure = attempts[0], attempts[0].rollout.failure
    assert failure is not None, "a broken attempt has a failure"
    names = dict.fromkeys(attempt.attack.name for attempt in attempts[1:] if attempt.attack is not first.attack)
    more = f"; the same holds for a policy that {'; '.join(names)}" if names else ""
    return Finding(
        seen=f"a policy that {first.attack.name} avoids its grade: the episode is {first.rollout.outcome} in"
        f" {failure.stage} ({failure.kind}: {failure.message[:200]}){more}",
        task=describe_task(first.seen.task),
        mend=first.attack.mend,
    )


CHECKS = (
    Check(
        id="semantic.floor_gap",
        asks="a policy that understands nothing earns no more than the claimed chance",
        why="training finds every reward that needs no understanding, and learns to collect it instead of the task",
        mend="make the verifier give nothing to such a reply, or claim its chance in `claims(task).chance`",
        run=_check_floor,
    ),
    Check(
        id="semantic.canary_floor",
        asks="replies and calls that try to break or to deceive the grader are scored, and earn nothing",
        why="a reply that breaks the grader avoids its grade: bad answers vanish from the mean instead of lowering it",
        mend="treat a reply as untrusted data: catch parsing errors, limit its size, and ignore instructions in it",
        run=_check_canaries,
    ),
)
