"""Aggregates: the figures over rows that were verified, in NeMo Gym's shape."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import quantiles
from typing import TypeVar
from weakref import WeakKeyDictionary

from gymsdk import metrics
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.jsonl import is_finite_number
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX, ScoredRollout
from gymsdk.rollouts.folder import WRITTEN, StoredVerdict
from gymsdk.rollouts.summary import ANSWER, FIGURED
from gymsdk.servers.app import RequestRejected
from gymsdk.types import AGENT_SUFFIX, Item, Rollout, Row

T = TypeVar("T")

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""Who makes the figures over many rows, on each event loop."""

THREAD_ROW_COUNT = 1000
"""Rows whose figures take longer than other requests should wait: those are made in a thread."""

MAX_ROWS = 250_000
"""Rows of one request: their figures take about a gigabyte while they are made."""


async def aggregate_rows(environment: Environment, body: Row) -> Item:
    """Give the figures over the `verify_responses` in *body*: what has no reward, or a masked one, does not count.

    The figures over many rows are made in a thread, one request after the other.

    Raises:
        Refused: They are not rows, or more than 250,000.
    """
    given = _read_rows(body)
    if len(given) <= THREAD_ROW_COUNT:
        return await _aggregate(environment, given)
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        return await _aggregate(environment, given)


async def _aggregate(environment: Environment, given: Sequence[Row]) -> Item:
    rows = await _run_in_thread_if_many(given, lambda: list(_number_repeats(given)))
    own, complaint = await _call_metrics_hook(environment, rows)
    figured, taken = await _run_in_thread_if_many(rows, lambda: _compute_metrics(environment.name, rows, own))
    complaints = "; ".join(filter(None, (complaint, taken)))
    return figured | ({"complaint": complaints} if complaints else {})


async def _run_in_thread_if_many(rows: Sequence[Row], work: Callable[[], T]) -> T:
    """Give what *work* on *rows* gives; of many, in a thread."""
    return work() if len(rows) <= THREAD_ROW_COUNT else await asyncio.to_thread(work)


def _compute_metrics(environment: str, rows: Sequence[Row], answered: Mapping[str, float]) -> tuple[Item, str | None]:
    """Return the figures of *rows*, and a complaint about those of the hook's that would replace one of the host's."""
    scored = [_to_scored(row) for row in rows]
    figures = metrics.aggregate(scored, answers=any(ANSWER in row for row in rows))
    own, complaint = metrics.merge_metrics(figures, answered)
    means = {name: value for name, value in figures.items() if name.startswith("mean/")}
    most = max(Counter(each.task for each in scored).values(), default=None)
    return {
        "agent_metrics": figures | own,
        "key_metrics": means | own,
        "group_level_metrics": metrics.summarize_tasks(
            scored, expected=most, samples={row[TASK_INDEX]: _sample_row(row) for row in rows}
        ),
        "repeat_level_metrics": _summarize_repeats(scored, environment + AGENT_SUFFIX),
    }, complaint


def _read_rows(body: Row) -> list[Row]:
    rows = body.get("verify_responses")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RequestRejected(422, "`verify_responses` must be a list of rows")
    if len(rows) > MAX_ROWS:
        raise RequestRejected(413, f"`verify_responses` has {len(rows)} rows; send at most {MAX_ROWS} at a time")
    return [row for row in rows if _is_counted(row)]


def _is_counted(row: Row) -> bool:
    reward = row.get("reward")
    return is_finite_number(reward) and row.get("mask_sample") is not True


def _number_repeats(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield *rows* each with its task and its place among the task's repeats: the next where it does not say."""
    seen: Counter[int] = Counter()
    for row in rows:
        task = _read_index(row, TASK_INDEX, 0)
        yield {**row, TASK_INDEX: task, ROLLOUT_INDEX: _read_index(row, ROLLOUT_INDEX, seen[task])}
        seen[task] += 1


def _read_index(row: Row, name: str, otherwise: int) -> int:
    index = row.get(name)
    if index is None:
        return otherwise
    if isinstance(index, bool) or not isinstance(index, int):
        raise RequestRejected(422, f"`{name}` of a row must be a whole number, not {str(index)[:80]!r}")
    return index


def _to_scored(row: Row) -> ScoredRollout:
    """Give *row* as figures need it: where it says which fields its verdict has, its other numbers are the task's."""
    verdict = _verdict_fields(row)
    kept = row.keys() if verdict is None else FIGURED | set(verdict)
    parts = row.get("reward_components")
    named = {f"reward_components/{name}": paid for name, paid in parts.items()} if isinstance(parts, dict) else {}
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    figured = {key: value for key, value in row.items() if key in kept and key not in {"response", "mask_sample"}}
    used = {"response": {"usage": usage}} if isinstance(usage, dict) else {}
    return metrics.parse_scored_rollout(figured | named | used, answer_key=ANSWER if ANSWER in row else None)


def _verdict_fields(row: Row) -> list[str] | None:
    ours = row.get("gymsdk")
    names = ours.get("verdict") if isinstance(ours, dict) else None
    return list(map(str, names)) if isinstance(names, list) else None


def _sample_row(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in {"responses_create_params", *WRITTEN}}


async def _call_metrics_hook(environment: Environment, rows: Sequence[Row]) -> tuple[dict[str, float], str | None]:
    """Give the environment's own figures, or what is wrong with its `metrics`: the rest stands all the same."""
    if not rows or not environment.has_metrics:
        return {}, None
    try:
        rollouts = await _run_in_thread_if_many(rows, lambda: [_to_rollout(row, environment.name) for row in rows])
        return await environment.metrics(rollouts), None
    except EpisodeError as error:
        return {}, str(error)


def _to_rollout(row: Row, environment: str) -> Rollout:
    """Give the rollout of a verified row, as far as it tells: without its response, which nobody sends along."""
    names = _verdict_fields(row)
    fields = {key: value for key, value in row.items() if (key in names if names is not None else key not in WRITTEN)}
    known = {"reward": row["reward"], "components": {}, "grader_timeout": row.get("grader_timeout") is True}
    return Rollout(
        id=f"{row[TASK_INDEX]}:{row[ROLLOUT_INDEX]}",
        environment=environment,
        row={key: value for key, value in row.items() if key not in WRITTEN},
        seed=0,
        repeat=row[ROLLOUT_INDEX],
        outcome="scored",
        reward=row["reward"],
        verdict=StoredVerdict.model_validate(fields | known),
    )


def _summarize_repeats(scored: Sequence[ScoredRollout], agent: str) -> list[Item]:
    """Give the spread over the tasks of every first rollout, every second, and so on, where there are several."""
    runs: defaultdict[int, list[ScoredRollout]] = defaultdict(list)
    for each in scored:
        runs[each.repeat].append(each)
    tasks = len({each.task for each in scored})
    return [_summarize_repeat(index, runs[index], tasks, agent) for index in sorted(runs)] if len(runs) > 1 else []


def _summarize_repeat(index: int, run: Sequence[ScoredRollout], tasks: int, agent: str) -> Item:
    there = len({each.task for each in run})
    entry: Item = {
        "agent_ref": {"name": agent},
        ROLLOUT_INDEX: index,
        "sample_count": there,
        "missing_count": tasks - there,
    }
    spread = metrics.summarize_fields(run)
    rewards = sorted(each.reward for each in run)
    low, _, high = quantiles(rewards, n=4, method="inclusive") if len(rewards) > 1 else rewards * 3
    error = metrics.std(rewards) / math.sqrt(len(rewards))
    quarters = {"sem/reward": error, "p25/reward": low, "p75/reward": high}
    return entry | spread | {name: figure for name, figure in quarters.items() if math.isfinite(figure)}
