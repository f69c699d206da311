"""The oracle: what `solve` plays earns what is claimed, and so do the other right answers that are claimed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gymsdk import wire
from gymsdk.checks.attack import gathered, named, played, sample, script, shown
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.models.scripted import build
from gymsdk.outcome import Rollout
from gymsdk.types import Claims, Task

TASKS = 16
"""Tasks the oracle plays."""

EPSILON = 1e-6

MOST = 3
"""Findings that are told one by one."""

NO_SOLVE = (
    "the environment does not say how a task is solved: add a hook `solve(task)` that answers a Message, or a"
    " list of ToolCall for the next turn"
)
"""What is missing where there is no oracle."""


async def solved(subject: Subject, environment: Environment, most: int = TASKS) -> list[tuple[Task, Claims, Rollout]]:
    """Give how the oracle plays the sampled tasks it can play; raises `NotApplicable` where there is none."""
    tasks = sample(subject.tasks, most)
    rollouts = await gathered(subject.oracle(environment, task) for task in tasks)
    known = [(task, rollout) for task, rollout in zip(tasks, rollouts, strict=True) if not _unknown(rollout)]
    if not known:
        raise NotApplicable(NO_SOLVE if tasks else "the environment has no tasks to solve")
    return [(task, await environment.claims(task), rollout) for task, rollout in known]


def _unknown(rollout: Rollout) -> bool:
    return rollout.failure is not None and rollout.failure.kind == "no_solution" and rollout.turns == 0


async def _maximum(subject: Subject) -> list[Finding]:
    async with subject.fresh() as environment:
        played_out = await solved(subject, environment)
    return few([found for task, claims, rollout in played_out for found in _short_of(task, claims, rollout)])


def few(findings: list[Finding]) -> list[Finding]:
    """Give the first of *findings*, and how many more there are."""
    more = len(findings) - MOST
    return findings if more <= 0 else [*findings[:MOST], Finding(seen=f"and {more} more like these")]


def _short_of(task: Task, claims: Claims, rollout: Rollout) -> Iterator[Finding]:
    said = f"what `solve` plays ({_last(rollout)})"
    if rollout.reward is None:
        failure = rollout.failure
        assert failure is not None, "what is not scored has a failure"
        yield Finding(
            seen=f"{said} is not scored: {failure.stage} {rollout.outcome} ({failure.kind}): {failure.message[:200]}",
            task=named(task),
        )
    elif abs(rollout.reward - claims.maximum) > EPSILON:
        ended = "" if rollout.ended == "done" else f"; the episode was ended by its budget of {rollout.ended}"
        yield Finding(
            seen=f"{said} earns {rollout.reward:g}, the claimed maximum is {claims.maximum:g}{ended}", task=named(task)
        )


def _last(rollout: Rollout) -> str:
    output = (rollout.response or {}).get("output") or []
    texts = [part["text"] for item in output if item.get("role") == "assistant" for part in item["content"]]
    return f"its last reply is {shown(texts[-1])}" if texts else "it replies nothing"


async def _variants(subject: Subject) -> list[Finding]:
    async with subject.fresh() as environment:
        asked = [
            (task, claims, variant, rollout)
            for task, claims, rollout in await solved(subject, environment)
            for variant in claims.variants
            if rollout.outcome == "scored"
        ]
        if not asked:
            raise NotApplicable("no task claims another right reply; list some in `claims(task).variants`")
        rollouts = await gathered(_instead(subject, environment, *each) for each in asked)
    pairs = zip(asked, rollouts, strict=True)
    return few(
        [found for (task, claims, variant, _), rollout in pairs for found in _refused(task, claims, variant, rollout)]
    )


async def _instead(
    subject: Subject, environment: Environment, task: Task, _claims: Claims, variant: str, rollout: Rollout
) -> Rollout:
    """Play as the oracle did, *variant* in place of its last reply."""
    way = script(rollout)
    replied = any(item.get("type") == "message" for item in way[-1]) if way else False
    before = way[:-1] if replied else way
    return await subject.told(environment, played([*before, [wire.message(variant, id="msg_0")]]), task)


def _refused(task: Task, claims: Claims, variant: str, rollout: Rollout) -> Iterator[Finding]:
    if rollout.reward is None or abs(rollout.reward - claims.maximum) > EPSILON:
        got = "is not scored" if rollout.reward is None else f"earns {rollout.reward:g}"
        yield Finding(
            seen=f"the reply {shown(variant)}, claimed to be right, {got}; the maximum is {claims.maximum:g}",
            task=named(task),
        )


async def _range(subject: Subject) -> list[Finding]:
    tasks = sample(subject.tasks, TASKS // 2)
    async with subject.fresh() as environment:
        findings = [found for task in tasks for found in _sensible(task, await environment.claims(task))]
        for name in ("oracle", "null", "random"):
            rollouts = await gathered(subject.play(environment, build(name), task) for task in tasks)
            for task, rollout in zip(tasks, rollouts, strict=True):
                findings += _within(task, await environment.claims(task), rollout, f"the {name} policy")
    return few(findings)


def _sensible(task: Task, claims: Claims) -> Iterator[Finding]:
    if not math.isfinite(claims.maximum) or not math.isfinite(claims.chance):
        yield Finding(seen=f"the claims are no finite numbers: {claims.maximum}, {claims.chance}", task=named(task))
    elif claims.chance > claims.maximum + EPSILON:
        seen = f"the claimed chance {claims.chance:g} is above the claimed maximum {claims.maximum:g}"
        yield Finding(seen=seen, task=named(task))


def _within(task: Task, claims: Claims, rollout: Rollout, who: str) -> Iterator[Finding]:
    if rollout.reward is None:
        if rollout.failure and rollout.failure.kind == "bad_answer":
            yield Finding(seen=f"{who} gets no reward: {rollout.failure.message[:200]}", task=named(task))
        return
    if rollout.reward > claims.maximum + EPSILON:
        seen = f"{who} earns {rollout.reward:g}, more than the claimed maximum {claims.maximum:g}"
        yield Finding(seen=seen, task=named(task))
    total = sum(rollout.components.values())
    if rollout.components and abs(total - rollout.reward) > EPSILON:
        seen = f"{who} earns {rollout.reward:g}, the components sum to {total:g}"
        yield Finding(seen=seen, task=named(task))


CHECKS = (
    Check(
        id="semantic.oracle_max",
        asks="what `solve` plays earns exactly the claimed maximum",
        why="a verifier that does not give full marks to the right answer punishes the policies that find it",
        mend="correct `solve`, the verifier, or `claims(task).maximum`: the three have to agree on every task",
        look=_maximum,
    ),
    Check(
        id="semantic.variants",
        asks="other right replies, as claimed, earn the maximum as well",
        why="a right answer in another notation that earns nothing teaches a notation, and adds noise to the reward",
        mend="make the verifier accept the variant, or take it out of `claims(task).variants`",
        look=_variants,
    ),
    Check(
        id="semantic.reward_range",
        asks="no reward is above the claimed maximum, and its components sum to it",
        why="figures are read against the maximum: a reward above it, or one that does not add up, falsifies them",
        mend="claim the most that can be earned, count what steps pay into it, and let components sum to the reward",
        look=_range,
    ),
)
