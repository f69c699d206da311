"""What a run came to: its figures per environment, taken from the lines on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean

from gymsdk import lines, metrics
from gymsdk.environment import Environment
from gymsdk.folder import RunFolder
from gymsdk.jobs import AGENT
from gymsdk.types import Row

ANSWER = "extracted_answer"
"""The verdict field that majority@k votes on, where an environment has it."""


async def summaries(folder: RunFolder, environments: Mapping[str, Environment], *, repeats: int) -> list[Row]:
    """Give the figures of each environment's rollouts, in NeMo Gym's shape where it has one."""
    return [await _summary(folder, environment, repeats) for environment in environments.values()]


async def _summary(folder: RunFolder, environment: Environment, repeats: int) -> Row:
    scored = [line for line in folder.read_rollouts() if line["gymsdk"]["environment"] == environment.name]
    failed = [line for line in folder.read_failures() if line["gymsdk"]["environment"] == environment.name]
    votes = any(ANSWER in line["gymsdk"]["verdict"] for line in scored)
    figured = [_figured(line, answer_key=ANSWER if votes else None) for line in scored]
    own = await environment.metrics([lines.read(line) for line in scored]) if scored else {}
    figures = metrics.aggregate(figured, answers=votes) | own
    return {
        "agent_ref": {"name": environment.name + AGENT},
        "environment": environment.name,
        "outcomes": dict(Counter(line["gymsdk"]["outcome"] for line in (*scored, *failed))),
        "failures": dict(Counter(line["_ng_failure_class"] for line in failed).most_common()),
        "usage": _usage([*scored, *failed]),
        "seconds": _seconds(scored),
        "agent_metrics": figures,
        "key_metrics": {key: value for key, value in figures.items() if key.startswith("mean/")} | own,
        "group_level_metrics": metrics.groups(figured, expected=repeats),
    }


def _figured(line: Row, *, answer_key: str | None) -> metrics.Scored:
    """Give a line's figures: those of its verdict and usage, not the numbers its row happens to hold."""
    kept = {*line["gymsdk"]["verdict"], "reward", "response", "_ng_task_index", "_ng_rollout_index"}
    return metrics.scored({key: value for key, value in line.items() if key in kept}, answer_key=answer_key)


def _usage(played: list[Row]) -> Row:
    totals: dict[str, Counter[str]] = {}
    for line in played:
        for role, used in line["gymsdk"]["usage"].items():
            totals.setdefault(role, Counter()).update({key: value for key, value in used.items() if value})
    return {role: dict(total) for role, total in totals.items()}


def _seconds(scored: list[Row]) -> dict[str, float]:
    """Give the mean seconds a scored rollout spent in each stage."""
    stages = [line["gymsdk"]["timing"]["stages"] for line in scored]
    names = dict.fromkeys(name for each in stages for name in each)
    return {name: fmean(each.get(name, 0.0) for each in stages) / 1e3 for name in names}
