"""Check that `solve` earns the claimed maximum, and that the claimed variants of its answer do too."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gymsdk import responses
from gymsdk.checks.attack import CONCURRENCY, TOLERANCE, build_policy, extract_turns, gather_bounded
from gymsdk.checks.phases import describe_task, sample_tasks, shorten_text
from gymsdk.checks.report import Check, Finding, NotApplicable, excuse_rewards
from gymsdk.checks.subject import Play, Subject
from gymsdk.environment import Environment
from gymsdk.models.scripted import ScriptedModel, build
from gymsdk.types import Claims, Rollout, Task

MAX_TASKS = 16
"""How many tasks the oracle plays."""

MAX_FINDINGS = 3
"""How many findings are reported one by one."""

BUDGET_LABELS = {
    "turns": "its budget of turns",
    "tools": "its budget of tool calls",
    "deadline": "its deadline",
    "tokens": "its budget of tokens",
}
"""Labels of the budgets that can end an episode."""

NO_SOLVE = (
    "the environment has no solution for its tasks: add a hook `solve(task)` that returns a Message, or a"
    " list of ToolCall for the next turn"
)
"""The message if there is no oracle."""


async def play_oracle(
    subject: Subject, environment: Environment, max_tasks: int = MAX_TASKS
) -> list[tuple[Task, Claims, Play]]:
    """Play the sampled tasks with the oracle. Raises `NotApplicable` if it can solve none."""
    tasks = sample_tasks(
        subject.tasks, await subject.count_affordable(environment, max_tasks, episodes=2 / CONCURRENCY)
    )
    plays = await gather_bounded(subject.play_oracle(environment, task) for task in tasks)
    solved = [(task, play) for task, play in zip(tasks, plays, strict=True) if not _is_unsolved(play.rollout)]
    if not solved:
        raise NotApplicable(NO_SOLVE if tasks else "the environment has no tasks to solve")
    return [(task, await environment.claims(task), play) for task, play in solved]


def _is_unsolved(rollout: Rollout) -> bool:
    # A `solve` that gives up after its first turn is a defect of the environment, and not a missing hook.
    return rollout.failure is not None and rollout.failure.kind == "no_solution" and rollout.turns == 0


async def _check_maximum(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        played_out = await play_oracle(subject, environment)
    found = {
        is_scored: [
            finding
            for task, claims, play in played_out
            if (play.rollout.reward is not None) == is_scored
            for finding in _find_shortfall(task, claims, play.rollout)
        ]
        for is_scored in (True, False)
    }
    # A constant judge explains wrong rewards, but not plays without a reward.
    return limit_findings(excuse_rewards(subject, found[True], found[False]))


def limit_findings(findings: list[Finding]) -> list[Finding]:
    """Return the first findings, and how many more there are."""
    more = len(findings) - MAX_FINDINGS
    return findings if more <= 0 else [*findings[:MAX_FINDINGS], Finding(problem=f"and {more} more like these")]


def _find_shortfall(task: Task, claims: Claims, rollout: Rollout) -> Iterator[Finding]:
    play_text = f"what `solve` plays ({_get_last_reply(rollout)})"
    if rollout.reward is None:
        failure = rollout.failure
        assert failure is not None, "a rollout without a reward has a failure"
        yield Finding(
            problem=f"{play_text} is not scored: {failure.stage} {rollout.outcome}"
            f" ({failure.kind}): {failure.message[:200]}",
            task=describe_task(task),
        )
    elif abs(rollout.reward - claims.maximum) > TOLERANCE and rollout.ended in BUDGET_LABELS:
        yield Finding(
            problem=f"{BUDGET_LABELS[rollout.ended]} ended the episode after {rollout.turns} turns, before `solve` was"
            f" done: it had earned {rollout.reward:g}, the claimed maximum is {claims.maximum:g}",
            task=describe_task(task),
            fix="allow more with --turns, --tool-calls or --deadline, which a run of this environment needs too, or"
            " let `solve` come to an end",
        )
    elif abs(rollout.reward - claims.maximum) > TOLERANCE:
        text = f"{play_text} earns {rollout.reward:g}, the claimed maximum is {claims.maximum:g}"
        yield Finding(problem=text, task=describe_task(task))


def _get_last_reply(rollout: Rollout) -> str:
    output = (rollout.response or {}).get("output") or []
    texts = [part["text"] for item in output if item.get("role") == "assistant" for part in item["content"]]
    return f"its last reply is {shorten_text(texts[-1])}" if texts else "it replies nothing"


async def _check_variants(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        variants = [
            (task, claims, variant, play)
            for task, claims, play in await play_oracle(subject, environment)
            for variant in claims.variants
            if play.rollout.outcome == "scored"
        ]
        if not variants:
            raise NotApplicable("no task claims another right reply; list variants in `claims(task).variants`")
        rollouts = await gather_bounded(_play_variant(subject, environment, *variant) for variant in variants)
    pairs = zip(variants, rollouts, strict=True)
    refused = [
        finding
        for (task, claims, variant, _), rollout in pairs
        for finding in _find_refused_variant(task, claims, variant, rollout)
    ]
    return limit_findings(excuse_rewards(subject, refused))


async def _play_variant(
    subject: Subject, environment: Environment, task: Task, _claims: Claims, variant: str, play: Play
) -> Rollout:
    """Play as the oracle did, with *variant* in place of its last reply."""
    turns = extract_turns(play)
    replied = any(item.get("type") == "message" for item in turns[-1]) if turns else False
    before = turns[:-1] if replied else turns
    policy = ScriptedModel("variant", build_policy([*before, [responses.build_message(variant, id="msg_0")]]))
    return await subject.play(environment, policy, task)


def _find_refused_variant(task: Task, claims: Claims, variant: str, rollout: Rollout) -> Iterator[Finding]:
    if rollout.reward is None or abs(rollout.reward - claims.maximum) > TOLERANCE:
        got = "is not scored" if rollout.reward is None else f"earns {rollout.reward:g}"
        yield Finding(
            problem=f"the reply {shorten_text(variant)}, claimed to be right, {got}; the maximum is {claims.maximum:g}",
            task=describe_task(task),
        )


async def _check_range(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = sample_tasks(
            subject.tasks, await subject.count_affordable(environment, MAX_TASKS // 2, episodes=3 / CONCURRENCY)
        )
        findings = [finding for task in tasks for finding in _find_claims_error(task, await environment.claims(task))]
        for name in ("oracle", "null", "random"):
            budget = subject.budget if name == "oracle" else subject.brief_budget
            plays = (subject.play(environment, build(name), task, budget=budget) for task in tasks)
            rollouts = await gather_bounded(plays)
            for task, rollout in zip(tasks, rollouts, strict=True):
                findings += _find_range_error(task, await environment.claims(task), rollout, f"the {name} policy")
    return limit_findings(findings)


def _find_claims_error(task: Task, claims: Claims) -> Iterator[Finding]:
    if not math.isfinite(claims.maximum) or not math.isfinite(claims.chance):
        yield Finding(
            problem=f"the claims are not finite numbers: {claims.maximum}, {claims.chance}", task=describe_task(task)
        )
    elif claims.chance > claims.maximum + TOLERANCE:
        text = f"the claimed chance {claims.chance:g} is above the claimed maximum {claims.maximum:g}"
        yield Finding(problem=text, task=describe_task(task))


def _find_range_error(task: Task, claims: Claims, rollout: Rollout, policy: str) -> Iterator[Finding]:
    if rollout.reward is None:
        if rollout.failure and rollout.failure.kind == "bad_answer":
            yield Finding(problem=f"{policy} gets no reward: {rollout.failure.message[:200]}", task=describe_task(task))
        return
    if rollout.reward > claims.maximum + TOLERANCE:
        text = f"{policy} earns {rollout.reward:g}, more than the claimed maximum {claims.maximum:g}"
        yield Finding(problem=text, task=describe_task(task))
    total = sum(rollout.components.values())
    if rollout.components and abs(total - rollout.reward) > TOLERANCE:
        text = f"{policy} earns {rollout.reward:g}, but the components sum to {total:g}"
        yield Finding(problem=text, task=describe_task(task))


CHECKS = (
    Check(
        id="semantic.oracle_max",
        requirement="what `solve` plays earns exactly the claimed maximum",
        why="a verifier that does not give full marks to the right answer punishes the policies that find it",
        fix="correct `solve`, the verifier, or `claims(task).maximum`: the three must agree on every task",
        run=_check_maximum,
    ),
    Check(
        id="semantic.variants",
        requirement="the claimed variants of a right reply earn the maximum too",
        why="a right answer in another notation that earns nothing teaches the notation and adds noise to the reward",
        fix="make the verifier accept the variant, or remove it from `claims(task).variants`",
        run=_check_variants,
    ),
    Check(
        id="semantic.reward_range",
        requirement="no reward is above the claimed maximum, and its components sum to it",
        why="metrics are read against the maximum: a reward above it, or components with another sum, falsify them",
        fix="claim the highest possible reward, include what steps pay in it, and let components sum to the reward",
        run=_check_range,
    ),
)
