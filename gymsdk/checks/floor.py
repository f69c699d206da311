"""The floor: what no policy may earn without understanding the task, and what no reply or call may break."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gymsdk.checks import early
from gymsdk.checks.attack import Attack, Attempt, Seen, attempted, looked_at
from gymsdk.checks.canary import CANARIES
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.luck import GRAIN, beyond
from gymsdk.checks.panel import PANEL
from gymsdk.checks.subject import Subject
from gymsdk.checks.tasks import named, sample
from gymsdk.environment import Environment

TASKS = 12
"""Tasks the panel is let loose on."""

MOST = 6
"""Findings of one sort that are told one by one."""


async def _floor(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        seen = await _opened(subject, environment, TASKS)
        attempts = await attempted(subject, environment, PANEL, seen)
    return [*shortened(_gains(attempts)), *broken(attempts)]


async def _canaries(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        seen = await _opened(subject, environment, early.TASKS)
        attempts = await attempted(subject, environment, CANARIES, seen)
        fresh = await early.unplayed(subject, environment, seen)
        cut = await early.cut(subject, environment, seen)
    return [*shortened(_gains([*attempts, *fresh])), *broken([*attempts, *fresh, *cut])]


async def _opened(subject: Subject, environment: Environment, most: int) -> list[Seen]:
    seen = await looked_at(subject, environment, sample(subject.tasks, most))
    if not seen:
        raise NotApplicable("the environment has no task that could be opened; give it a `tasks` hook or data/*.jsonl")
    return seen


def _gains(attempts: Iterable[Attempt]) -> list[Finding]:
    by_attack: defaultdict[Attack, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_attack[attempt.attack].append(attempt)
    return [*_above(attempts), *(finding for tried in by_attack.values() for finding in beyond(tried))]


def _above(attempts: Iterable[Attempt]) -> list[Finding]:
    """Give the first attempt that earned more than the maximum."""
    for attempt in attempts:
        maximum = attempt.seen.claims.maximum
        if attempt.earned > maximum + GRAIN:
            seen = (
                f"a policy that {attempt.attack.name} earns {attempt.earned:g}, more than the claimed maximum {maximum:g}"
            )
            mend = "claim the most that can be earned in `claims(task).maximum`, or cap the reward"
            return [Finding(seen=seen, task=named(attempt.seen.task), mend=mend)]
    return []


def shortened(findings: Sequence[Finding]) -> list[Finding]:
    """Give *findings*, those after the first `MOST` in one sentence."""
    kept, rest = list(findings[:MOST]), findings[MOST:]
    if not rest:
        return kept
    more = "; ".join(finding.seen.partition(", where ")[0].removeprefix("a policy that ") for finding in rest)
    return [*kept, Finding(seen=f"so does, or does more, a policy that {more}")]


def broken(attempts: Iterable[Attempt]) -> list[Finding]:
    """Give the ways in which attempts were not scored, the first attempt of each."""
    ways: defaultdict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if failure := attempt.rollout.failure:
            ways[failure.stage, failure.kind].append(attempt)
    return [_breakage(tried) for tried in ways.values()]


def _breakage(attempts: list[Attempt]) -> Finding:
    first, failure = attempts[0], attempts[0].rollout.failure
    assert failure is not None, "a breakage has one"
    names = dict.fromkeys(attempt.attack.name for attempt in attempts[1:] if attempt.attack is not first.attack)
    more = f"; so does one that {'; '.join(names)}" if names else ""
    return Finding(
        seen=f"a policy that {first.attack.name} dodges its grade: the episode is {first.rollout.outcome} in"
        f" {failure.stage} ({failure.kind}: {failure.message[:200]}){more}",
        task=named(first.seen.task),
        mend=first.attack.mend,
    )


CHECKS = (
    Check(
        id="semantic.floor_gap",
        asks="a policy that understands nothing earns no more than the claimed chance",
        why="training finds whatever pays without understanding, and learns that instead of the task",
        mend="make the verifier give nothing to such a reply, or claim the chance it has in `claims(task).chance`",
        run=_floor,
    ),
    Check(
        id="semantic.canary_floor",
        asks="replies and calls made to break or to deceive the grader are scored, and earn nothing",
        why="a reply that breaks the grader dodges its grade: bad answers vanish from the mean instead of lowering it",
        mend="treat what the policy wrote as data of any kind: parse it under a guard, bound it, do not obey it",
        run=_canaries,
    ),
)
