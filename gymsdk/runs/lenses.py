"""Saved filters that look for known problems of rewards, such as groups without variance or answers that always win.

Each is a condition on the field `lens`, such as `lens=alike`. The viewer offers them by their rules.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

Condition = tuple[str, tuple[object, ...]]
"""A condition in SQL on the table `rollout r`, and its values."""

FULL_REWARD = 1.0

SHORT_SHARE = 0.05
"""The share of the rollouts that count as short."""

SLOW_SHARE = 0.01
"""The share of the rollouts that count as slow."""

COMMON_SHARE, MIN_COMMON_TASKS = 0.05, 5
"""The share of an environment's tasks, and the least number of them, for which a rewarded answer is suspicious."""

MIN_CORRELATION, MIN_CORRELATED = 0.9, 20
"""The correlation with the number of tokens that is suspicious, and the least number of rollouts that show it."""


@dataclass(frozen=True)
class Lens:
    """A saved filter.

    Attributes:
        name: The name in conditions.
        title: The name that people see.
        rule: Which rollouts it finds.
        build: Returns the condition for the rollouts in an index.
    """

    name: str
    title: str
    rule: str
    build: Callable[[sqlite3.Connection], Condition]


@dataclass(frozen=True)
class LengthComponent:
    """A component of the reward that follows the length of the rollouts.

    Attributes:
        name: The component.
        correlation: Pearson's correlation with the number of tokens.
    """

    name: str
    correlation: float


def find_length_components(connection: sqlite3.Connection) -> list[LengthComponent]:
    """Return the components of the reward that rise with the number of tokens: they may reward length itself."""
    rows = connection.execute(
        "SELECT f.name, count(*), avg(f.value), avg(r.tokens), avg(f.value * r.tokens), avg(f.value * f.value),"
        " avg(1.0 * r.tokens * r.tokens) FROM figure f JOIN rollout r ON r.id = f.rollout"
        " WHERE f.name >= 'part/' AND f.name < 'part0' AND r.tokens IS NOT NULL GROUP BY f.name HAVING count(*) >= ?",
        (MIN_CORRELATED,),
    )
    found = []
    for name, _, value, tokens, product, values, squares in rows:
        if not all(
            sum_or_mean is not None and math.isfinite(sum_or_mean)
            for sum_or_mean in (value, tokens, product, values, squares)
        ):
            # A value is so large that its square is not.
            continue
        spread = (values - value**2) * (squares - tokens**2)
        correlation = (
            (product - value * tokens) / math.sqrt(spread) if spread > 1e-12 * max(1.0, squares) else 0.0
        )  # rounding
        if correlation > MIN_CORRELATION:
            found.append(LengthComponent(name, correlation))
    return sorted(found, key=lambda component: -component.correlation)


def _find_alike(_: sqlite3.Connection) -> Condition:
    return (
        (
            "(r.environment, r.task) IN (SELECT environment, task FROM rollout WHERE reward IS NOT NULL"
            " GROUP BY environment, task HAVING count(*) > 1 AND min(reward) = max(reward))"
        ),
        (),
    )


def _find_odd(connection: sqlite3.Connection) -> Condition:
    rows = connection.execute(
        "SELECT environment, task, count(*), min(id) FROM rollout WHERE reward IS NOT NULL"
        " GROUP BY environment, task, reward ORDER BY environment, task"
    )
    odd: list[int] = []
    for _, group in groupby(rows, key=lambda row: (row[0], row[1])):
        counts = sorted((count, rollout) for _, _, count, rollout in group)
        if len(counts) == 2 and counts[0][0] == 1 and counts[1][0] > 1:  # noqa: PLR2004  # two rewards
            odd.append(counts[0][1])
    return f"r.id IN ({', '.join(map(str, odd))})", ()


def _find_short(connection: sqlite3.Connection) -> Condition:
    [count] = connection.execute("SELECT count(tokens) FROM rollout").fetchone()
    limit = connection.execute(
        "SELECT tokens FROM rollout WHERE tokens IS NOT NULL ORDER BY tokens LIMIT 1 OFFSET ?",
        (math.ceil(count * SHORT_SHARE),),
    ).fetchone()
    return "r.reward >= ? AND r.tokens < ?", (FULL_REWARD, limit[0] if limit else 0)


def _find_common_answers(connection: sqlite3.Connection) -> Condition:
    totals = dict(
        tuple(row)
        for row in connection.execute("SELECT environment, count(DISTINCT task) FROM rollout GROUP BY environment")
    )
    rows = connection.execute(
        "SELECT environment, answer, count(DISTINCT task) FROM rollout WHERE reward >= ? AND answer <> ''"
        " GROUP BY environment, answer HAVING count(DISTINCT task) >= ?",
        (FULL_REWARD, MIN_COMMON_TASKS),
    )
    pairs = [
        (environment, answer) for environment, answer, tasks in rows if tasks >= COMMON_SHARE * totals[environment]
    ]
    if not pairs:
        return "0", ()
    marks = ", ".join(["(?, ?)"] * len(pairs))
    values = tuple(value for pair in pairs for value in pair)
    return f"r.reward >= ? AND (r.environment, r.answer) IN (VALUES {marks})", (FULL_REWARD, *values)


def _find_slowest(connection: sqlite3.Connection) -> Condition:
    [count] = connection.execute("SELECT count(seconds) FROM rollout").fetchone()
    limit = connection.execute(
        "SELECT seconds FROM rollout WHERE seconds IS NOT NULL ORDER BY seconds DESC LIMIT 1 OFFSET ?",
        (max(0, math.ceil(count * SLOW_SHARE) - 1),),
    ).fetchone()
    return "r.seconds >= ?", (limit[0] if limit else 0,)


def _find_length_rewards(connection: sqlite3.Connection) -> Condition:
    names = [component.name for component in find_length_components(connection)]
    marks = ", ".join("?" * len(names))
    return f"EXISTS (SELECT 1 FROM figure f WHERE f.rollout = r.id AND f.name IN ({marks}))", tuple(names)  # noqa: S608


def _find_changed(_: sqlite3.Connection) -> Condition:
    return (
        (
            "EXISTS (SELECT 1 FROM figure f WHERE f.rollout = r.id AND f.name = 'stored_reward'"
            " AND abs(f.value - r.reward) > 1e-9)"
        ),
        (),
    )


LENSES = {
    lens.name: lens
    for lens in (
        Lens("alike", "no variance", "tasks with equal rewards in all rollouts", _find_alike),
        Lens("odd", "odd one out", "the only rollout of a task with another reward than the rest", _find_odd),
        Lens("short", "short and right", "reward 1 or more with fewer tokens than 95 % of the rollouts", _find_short),
        Lens(
            "common",
            "one answer for many tasks",
            "reward 1 or more for an answer that is right for 5 % of the tasks, and for at least 5",
            _find_common_answers,
        ),
        Lens(
            "length",
            "length is rewarded",
            "a component of the reward rises with the number of tokens (r > 0.9)",
            _find_length_rewards,
        ),
        Lens("changed", "changed by reverify", "`gymsdk reverify -o` has changed the reward", _find_changed),
        Lens("slowest", "slowest 1 %", "the hundredth of the rollouts that took longest", _find_slowest),
    )
}
"""The lenses by their names."""
