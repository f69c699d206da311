"""Metrics of verified rows in NeMo Gym's format, for `/aggregate_metrics`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import quantiles
from typing import TypeVar
from weakref import WeakKeyDictionary

from gymsdk import metrics
from gymsdk.edge.errors import RequestRejected
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.line import MASK, RESULT_FIELDS, ROLLOUT_INDEX, SKIPPED, TASK_INDEX, StoredRollout, StoredVerdict
from gymsdk.metrics import ANSWER, ScoredRollout
from gymsdk.types import AGENT_SUFFIX, Item, Rollout, Row

T = TypeVar("T")

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""The lock of each event loop, which only one large request at a time may hold."""

THREAD_ROW_COUNT = 1000
"""Number of rows from which metrics are computed in a thread, so that other requests do not wait."""

MAX_ROWS = 250_000
"""Largest number of rows in one request; aggregating them takes about a gigabyte."""


async def aggregate_rows(environment: Environment, body: Row) -> Item:
    """Return the metrics of the rows in `verify_responses`, except rows without a reward or with a masked reward.

    A thread computes the metrics of a large request, one request at a time.

    Raises:
        RequestRejected: The rows are invalid, or there are more than `MAX_ROWS`.
    """
    received = _read_rows(body)
    if len(received) <= THREAD_ROW_COUNT:
        return await _aggregate(environment, received)
    # Several large requests at once could exhaust the memory.
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        return await _aggregate(environment, received)


async def _aggregate(environment: Environment, received: Sequence[Row]) -> Item:
    rows = await _run_in_thread_if_many(received, lambda: list(_number_repeats(received)))
    hook_metrics, hook_error = await _call_metrics_hook(environment, rows)
    metrics_by_level, name_conflict = await _run_in_thread_if_many(
        rows, lambda: _compute_metrics(environment.name, rows, hook_metrics)
    )
    complaints = "; ".join(filter(None, (hook_error, name_conflict)))
    return metrics_by_level | ({"complaint": complaints} if complaints else {})


async def _run_in_thread_if_many(rows: Sequence[Row], work: Callable[[], T]) -> T:
    """Run `work` in a thread if there are many rows."""
    return work() if len(rows) <= THREAD_ROW_COUNT else await asyncio.to_thread(work)


def _compute_metrics(
    environment: str, rows: Sequence[Row], hook_metrics: Mapping[str, float]
) -> tuple[Item, str | None]:
    """Return the metrics, and an error if metrics of the environment have the names of the host's metrics."""
    unmasked = ({key: value for key, value in row.items() if key != MASK} for row in rows)
    scored = [metrics.parse_scored_rollout(StoredRollout(row)) for row in unmasked]
    host_metrics = metrics.aggregate(scored, answers=any(ANSWER in row for row in rows))
    own_metrics, name_conflict = metrics.merge_metrics(host_metrics, hook_metrics)
    means = {name: value for name, value in host_metrics.items() if name.startswith("mean/")}
    repeats = max(Counter(rollout.task for rollout in scored).values(), default=None)
    left_out = {"responses_create_params", *RESULT_FIELDS}
    samples = {row[TASK_INDEX]: {key: value for key, value in row.items() if key not in left_out} for row in rows}
    return {
        "agent_metrics": host_metrics | own_metrics,
        "key_metrics": means | own_metrics,
        "group_level_metrics": metrics.summarize_tasks(scored, expected=repeats, samples=samples),
        "repeat_level_metrics": _summarize_repeats(scored, environment + AGENT_SUFFIX),
    }, name_conflict


def _read_rows(body: Row) -> list[Row]:
    rows = body.get("verify_responses")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestRejected(422, "`verify_responses` must be a list of rows")
    if len(rows) > MAX_ROWS:
        raise RequestRejected(413, f"`verify_responses` has {len(rows)} rows; send at most {MAX_ROWS} at a time")
    return [row for row in rows if _is_counted(row)]


def _is_counted(row: Row) -> bool:
    # NeMo Gym counts the reward that its agent sets in place of a verification, and leaves out every masked row.
    given = {key: value for key, value in row.items() if key != SKIPPED} if SKIPPED in row else row
    return row.get(MASK) is not True and StoredRollout(given).reward is not None


def _number_repeats(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows with their rewards as floats, and with task and repeat indices.

    A missing repeat index is the number of the task's earlier rows. The rows of a request have no line numbers, so
    that a missing task index is 0.
    """
    counts: Counter[int] = Counter()
    for row in rows:
        task = _read_index(row, TASK_INDEX, 0)
        indices = {TASK_INDEX: task, ROLLOUT_INDEX: _read_index(row, ROLLOUT_INDEX, counts[task])}
        yield {**row, "reward": float(row["reward"]), **indices}
        counts[task] += 1


def _read_index(row: Row, name: str, default: int) -> int:
    index = row.get(name)
    if index is None:
        return default
    if isinstance(index, bool) or not isinstance(index, int):
        raise RequestRejected(422, f"`{name}` of a row must be a whole number, not {str(index)[:80]!r}")
    return index


async def _call_metrics_hook(environment: Environment, rows: Sequence[Row]) -> tuple[dict[str, float], str | None]:
    """Return the metrics of the environment's `metrics` hook, or the error with which the hook failed."""
    if not rows or not environment.has_metrics:
        return {}, None
    try:
        rollouts = await _run_in_thread_if_many(rows, lambda: [_to_rollout(row, environment.name) for row in rows])
        return await environment.metrics(rollouts), None
    except EpisodeError as error:
        return {}, str(error)


def _to_rollout(row: Row, environment: str) -> Rollout:
    """Build a rollout from a verified row, without its response, which clients do not send."""
    names = StoredRollout(row).verdict_names
    fields = {
        key: value for key, value in row.items() if (key in names if names is not None else key not in RESULT_FIELDS)
    }
    known = {"reward": row["reward"], "components": {}, "grader_timeout": row.get("grader_timeout") is True}
    return Rollout(
        id=f"{row[TASK_INDEX]}:{row[ROLLOUT_INDEX]}",
        environment=environment,
        row={key: value for key, value in row.items() if key not in RESULT_FIELDS},
        seed=0,
        repeat=row[ROLLOUT_INDEX],
        outcome="scored",
        reward=row["reward"],
        verdict=StoredVerdict.model_validate(fields | known),
    )


def _summarize_repeats(scored: Sequence[ScoredRollout], agent: str) -> list[Item]:
    """Return the metrics of each repeat over all tasks, if there are several repeats."""
    repeats: defaultdict[int, list[ScoredRollout]] = defaultdict(list)
    for rollout in scored:
        repeats[rollout.repeat].append(rollout)
    tasks = len({rollout.task for rollout in scored})
    if len(repeats) <= 1:
        return []
    return [_summarize_repeat(index, repeats[index], tasks, agent) for index in sorted(repeats)]


def _summarize_repeat(index: int, rollouts: Sequence[ScoredRollout], tasks: int, agent: str) -> Item:
    count = len({rollout.task for rollout in rollouts})
    entry: Item = {
        "agent_ref": {"name": agent},
        ROLLOUT_INDEX: index,
        "sample_count": count,
        "missing_count": tasks - count,
    }
    field_metrics = metrics.summarize_fields(rollouts)
    rewards = sorted(rollout.reward for rollout in rollouts)
    low, _, high = quantiles(rewards, n=4, method="inclusive") if len(rewards) > 1 else rewards * 3
    error = metrics.std(rewards) / math.sqrt(len(rewards))
    reward_metrics = {"sem/reward": error, "p25/reward": low, "p75/reward": high}
    return entry | field_metrics | {name: value for name, value in reward_metrics.items() if math.isfinite(value)}
