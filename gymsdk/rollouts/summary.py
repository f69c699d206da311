"""Summarize a run: the metrics of each environment, computed from the lines on disk."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol, overload

from gymsdk import jsonl, metrics
from gymsdk.concurrency import yield_regularly
from gymsdk.errors import EpisodeError
from gymsdk.line import NoReward, StoredRollout
from gymsdk.metrics import ANSWER, ScoredRollout
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.inputs import InputIndex
from gymsdk.rollouts.token_limit import TokenLimitCounter, is_prompt_too_long
from gymsdk.types import AGENT_SUFFIX, Item, Rollout, Row

RAISED = frozenset({"hook_raised", "tool_raised"})
"""Kinds of failure in which the environment's own code raised an exception."""


class MetricsSource(Protocol):
    """Computes an environment's own metrics, in this process or on its servers."""

    @property
    def name(self) -> str:
        """The environment's name."""

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the environment's own metrics over scored *rollouts*; raises `EpisodeError`."""


@dataclass(slots=True)
class Tally:
    """The sums over the lines of one environment; *agent* is the agent that its rows name."""

    agent: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    overspent: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    terminal: int = 0
    retryable: int = 0
    raised: int = 0
    tasks: set[int] = field(default_factory=set)
    unfit: int = 0
    messages: dict[str, str] = field(default_factory=dict)
    usage: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    milliseconds: Counter[str] = field(default_factory=Counter)
    scored: list[ScoredRollout] = field(default_factory=list)
    votes: bool = False
    limit: TokenLimitCounter = field(default_factory=lambda: TokenLimitCounter("--max-output-tokens"))

    def add(self, stored: StoredRollout) -> None:
        """Count a rollout, with or without a reward."""
        absent = stored.find_no_reward()
        if absent is None:
            self._add_scored(stored)
        else:
            self._add_failed(stored, absent)
        self.tasks.add(stored.task)
        self.agent = stored.agent or self.agent
        self.outcomes["scored" if absent is None else absent.outcome] += 1
        for role, used in stored.usage.items():
            self.usage[role].update({key: value for key, value in used.items() if value})

    def _add_scored(self, stored: StoredRollout) -> None:
        self.scored.append(metrics.parse_scored_rollout(stored))
        self.votes = self.votes or ANSWER in (stored.verdict_names or ())
        self.milliseconds.update(stored.stages)
        self.ended[stored.ended] += 1
        self.overspent += bool(stored.line.get("grader_timeout"))
        self.unfit += is_prompt_too_long(stored.response)
        self.limit.add_stored(stored)

    def _add_failed(self, stored: StoredRollout, absent: NoReward) -> None:
        kind = absent.kind
        self.failures[kind] += 1
        # A resume keeps the lines of rollouts.jsonl, also if the reward does not count.
        terminal = stored.terminal or (stored.terminal is None and "reward" in stored.line)
        self.terminal += terminal
        self.retryable += not terminal and stored.is_retryable
        self.raised += not terminal and kind in RAISED
        self.messages.setdefault(kind, absent.message)


class StoredRollouts(Sequence[Rollout]):
    """The scored rollouts of *environment*, read from disk at each iteration and never all in memory."""

    def __init__(self, read: Callable[[], Iterable[StoredRollout]], environment: str, *, count: int) -> None:
        self._read = read
        self._environment = environment
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Rollout]:
        rollouts = (stored for stored in self._read() if stored.environment == self._environment)
        return (stored.to_rollout() for stored in rollouts if stored.reward is not None)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            wanted = set(range(self._count)[index])
            return [rollout for number, rollout in enumerate(self) if number in wanted]
        return next(islice(self, range(self._count)[index], None))


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of one environment's rollouts, in NeMo Gym's format where it defines one.

    Attributes:
        metrics: The metrics, without those of each task.
        scored: The numbers of the scored rollouts.
        samples: The rows of the tasks.
    """

    metrics: Row
    scored: Sequence[ScoredRollout]
    samples: InputIndex

    def iter_tasks(self) -> Iterator[Item]:
        """Yield the metrics of each task, computed one by one: together they have gigabytes for some environments."""
        return metrics.iter_task_summaries(self.scored, expected=self.samples.counts, samples=self.samples)


async def build_summaries(folder: RunFolder, environments: Mapping[str, MetricsSource]) -> list[Summary]:
    """Return the summary of each environment. No rollout stays in memory.

    The event loop reads the lines, and runs its other tasks in between. A thread would compete with the loop for the
    interpreter lock, which uvloop takes for each event of a connection.
    """
    tallies = await _tally(folder, environments)
    samples = await InputIndex(folder.inputs).read_in_turn()
    return [
        Summary(await _summarize(environment, tallies[name], folder.read_rollouts), tallies[name].scored, samples)
        for name, environment in environments.items()
    ]


def iter_metrics_json(summaries: Iterable[Summary]) -> Iterator[bytes]:
    """Yield the pieces of metrics.json, which is too large for the memory of a run with many tasks."""
    separator = b"[\n"
    for summary in summaries:
        head = jsonl.dump_portable_json(summary.metrics, indent=True).removesuffix(b"\n}")
        yield separator + _indent(head, 2) + b',\n    "group_level_metrics": ['
        separator = b",\n"
        has_tasks = False
        for entry in summary.iter_tasks():
            text = jsonl.dump_portable_json(entry, indent=True)
            yield (b",\n" if has_tasks else b"\n") + _indent(text, 6)
            has_tasks = True
        yield b"\n    ]\n  }" if has_tasks else b"]\n  }"
    yield b"[]\n" if separator == b"[\n" else b"\n]\n"


def _indent(text: bytes, spaces: int) -> bytes:
    """Return JSON with more space before each line. A line break within a string is an escape, so none is affected."""
    return b" " * spaces + text.replace(b"\n", b"\n" + b" " * spaces)


async def _tally(folder: RunFolder, environments: Iterable[str]) -> dict[str, Tally]:
    """Return the sums over the lines of each environment."""
    tallies = {name: Tally() for name in environments}
    async for stored in yield_regularly(chain(folder.read_rollouts(), folder.read_failures())):
        tallies[stored.environment].add(stored)
    return tallies


async def _summarize(environment: MetricsSource, tally: Tally, read: Callable[[], Iterable[StoredRollout]]) -> Row:
    count = len(tally.scored)
    figures = await asyncio.to_thread(metrics.aggregate, tally.scored, answers=tally.votes)
    own, complaint = await _compute_own_metrics(
        environment, StoredRollouts(read, environment.name, count=count), figures
    )
    figures |= own
    return {
        "agent_ref": {"name": tally.agent or environment.name + AGENT_SUFFIX},
        "environment": environment.name,
        "tasks": len(tally.tasks),
        "outcomes": dict(tally.outcomes),
        "ended": dict(tally.ended.most_common()),
        "prompts_too_long": tally.unfit,
        "token_limit": tally.limit.describe() or None,
        "grader_timeouts": tally.overspent,
        "failures": dict(tally.failures.most_common()),
        "failure_shares": {
            kind: failed / max(1, sum(tally.outcomes.values())) for kind, failed in tally.failures.items()
        },
        "failures_for_good": tally.terminal,
        "failures_retryable": tally.retryable,
        "failures_raised": tally.raised,
        "failure_messages": tally.messages,
        "complaint": complaint,
        "usage": {role: dict(used) for role, used in tally.usage.items()},
        "seconds": {stage: spent / 1e3 / count for stage, spent in tally.milliseconds.items()},
        "agent_metrics": figures,
        "key_metrics": {key: value for key, value in figures.items() if key.startswith("mean/")} | own,
    }


async def _compute_own_metrics(
    environment: MetricsSource, rollouts: Sequence[Rollout], host_metrics: Mapping[str, float]
) -> tuple[dict[str, float], str | None]:
    """Return the environment's own metrics beside the general *host_metrics*, and the error of its `metrics` hook.

    An error of the hook does not invalidate the rollouts.
    """
    if not rollouts:
        return {}, None
    try:
        return metrics.merge_metrics(host_metrics, await environment.metrics(rollouts))
    except EpisodeError as error:
        return {}, str(error)
