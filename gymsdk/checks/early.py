"""An early verdict: `verify` asked right after `reset`, or after the first turns of the oracle and no more."""

from __future__ import annotations

from collections.abc import Sequence

from gymsdk.checks.attack import Attack, Attempt, Seen, Turns, played
from gymsdk.checks.performance import Performance, Script
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.models.scripted import Scripted
from gymsdk.outcome import Rollout

TASKS = 4
"""Tasks that are judged early."""

PREFIXES = 4
"""Beginnings of one oracle's way that are judged."""

MEND = "let `verify` take a transcript that has just begun, without reply or calls: it is worth 0, and no error"

AT_RESET = Attack("is judged right after reset", lambda _: [], MEND)
CUT = Attack("stops in the middle of what the oracle does", lambda _: [], MEND)


async def unplayed(subject: Subject, environment: Environment, seen: Sequence[Seen]) -> list[Attempt]:
    """Give what is earned before the policy has said anything."""
    return [Attempt(AT_RESET, each, [], await _judged(subject, environment, each)) for each in seen[:TASKS]]


async def _judged(subject: Subject, environment: Environment, seen: Seen) -> Rollout:
    performance = Performance(Script("nobody", seen.task, subject.seed, (), subject.brief_budget), environment)
    await performance.play_all()
    return performance.rollout


async def cut(subject: Subject, environment: Environment, seen: Sequence[Seen]) -> list[Attempt]:
    """Give what comes of the beginnings of the oracle's ways.

    Where only the closing words are missing the whole reward is right, so nothing is asked of these but a verdict.
    """
    begun = [(each, each.own[:length]) for each in seen[:TASKS] for length in range(1, len(each.own))[:PREFIXES]]
    return [Attempt(CUT, each, way, await _stopped(subject, environment, each, way)) for each, way in begun]


async def _stopped(subject: Subject, environment: Environment, seen: Seen, way: Turns) -> Rollout:
    budget = subject.budget.model_copy(update={"turns": len(way)})
    return await subject.play(environment, Scripted("cut", played(way)), seen.task, budget=budget)
