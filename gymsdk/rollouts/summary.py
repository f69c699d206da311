"""Summarize a run: the metrics of each environment, computed from the lines on disk."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol, Self, overload

from gymsdk import jsonl, metrics
from gymsdk.concurrency import yield_regularly
from gymsdk.errors import EpisodeError
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, NoReward, StoredRollout, find_no_reward, get_agent_name, read_reward
from gymsdk.metrics import ScoredRollout
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.token_limit import TokenLimitCounter, is_prompt_too_long
from gymsdk.types import AGENT_SUFFIX, Item, Rollout, Row

ANSWER = "extracted_answer"
"""The field of a verdict on which majority@k and vote@k vote, if an environment has it."""

RAISED = frozenset({"hook_raised", "tool_raised"})
"""Kinds of failure in which the environment's own code raised an exception."""

METRIC_FIELDS = frozenset({"reward", "response", TASK_INDEX, ROLLOUT_INDEX})
"""The keys of a line that become metrics, beside the fields of its verdict; the numbers of its row do not."""


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

    def add(self, line: Row) -> None:
        """Count a rollout, with or without a reward."""
        absent = find_no_reward(line)
        if absent is None:
            self._add_scored(line, float(line["reward"]))
        else:
            self._add_failed(line, absent)
        host_fields = line["gymsdk"]
        self.tasks.add(line[TASK_INDEX])
        self.agent = get_agent_name(line) or self.agent
        self.outcomes["scored" if absent is None else absent.outcome] += 1
        for role, used in host_fields["usage"].items():
            self.usage[role].update({key: value for key, value in used.items() if value})

    def _add_scored(self, line: Row, reward: float) -> None:
        host_fields = line["gymsdk"]
        kept = METRIC_FIELDS.union(host_fields["verdict"])
        parts = {f"reward_components/{name}": paid for name, paid in line.get("reward_components", {}).items()}
        figured = {key: value for key, value in line.items() if key in kept} | parts
        answer_key = ANSWER if ANSWER in host_fields["verdict"] else None
        self.scored.append(metrics.build_scored_rollout(figured, reward, answer_key=answer_key))
        self.votes = self.votes or ANSWER in host_fields["verdict"]
        self.milliseconds.update(host_fields["timing"]["stages"])
        self.ended[host_fields["ended"]] += 1
        self.overspent += bool(line.get("grader_timeout"))
        self.unfit += is_prompt_too_long(line.get("response"))
        self.limit.add_line(line)

    def _add_failed(self, line: Row, absent: NoReward) -> None:
        kind = absent.kind
        self.failures[kind] += 1
        # A resume keeps the lines of rollouts.jsonl, also if the reward does not count.
        terminal = bool(line.get("_ng_failure_terminal", "reward" in line))
        self.terminal += terminal
        # A folder of an earlier version lacks this key.
        self.retryable += not terminal and bool(line["gymsdk"].get("retryable", True))
        self.raised += not terminal and kind in RAISED
        self.messages.setdefault(kind, absent.message)


class StoredRollouts(Sequence[Rollout]):
    """The scored rollouts of *environment*, read from disk at each iteration and never all in memory."""

    def __init__(self, read: Callable[[], Iterable[Row]], environment: str, *, count: int) -> None:
        self._read = read
        self._environment = environment
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Rollout]:
        lines = (line for line in self._read() if line["gymsdk"]["environment"] == self._environment)
        return (StoredRollout(line).to_rollout() for line in lines if read_reward(line) is not None)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            wanted = set(range(self._count)[index])
            return [rollout for number, rollout in enumerate(self) if number in wanted]
        return next(islice(self, range(self._count)[index], None))


class StoredSamples(Mapping[int, Row]):
    """The first row of each task without its prompt, read from inputs.jsonl at each access.

    Create it with `find`.

    Attributes:
        counts: The number of rows of each task.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[int, int] = {}
        self.counts = Counter[int]()

    @classmethod
    async def find(cls, path: Path) -> Self:
        """Find the rows in the file *path*, while the event loop runs its other tasks."""
        samples, offset = cls(path), 0
        with path.open("rb") as file:
            async for line in yield_regularly(file):
                if line.strip():
                    task = jsonl.parse_row(line, where=str(path))[TASK_INDEX]
                    samples._offsets.setdefault(task, offset)
                    samples.counts[task] += 1
                offset += len(line)
        return samples

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[int]:
        return iter(self._offsets)

    def __getitem__(self, task: int) -> Row:
        offset = self._offsets[task]
        with self._path.open("rb") as file:
            file.seek(offset)
            row = jsonl.parse_row(file.readline(), where=str(self._path))
        return {key: value for key, value in row.items() if key != "responses_create_params"}


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
    samples: StoredSamples

    def iter_tasks(self) -> Iterator[Item]:
        """Yield the metrics of each task, computed one by one: together they have gigabytes for some environments."""
        return metrics.iter_task_summaries(self.scored, expected=self.samples.counts, samples=self.samples)


async def build_summaries(folder: RunFolder, environments: Mapping[str, MetricsSource]) -> list[Summary]:
    """Return the summary of each environment. No rollout stays in memory.

    The event loop reads the lines, and runs its other tasks in between. A thread would compete with the loop for the
    interpreter lock, which uvloop takes for each event of a connection.
    """
    tallies = await _tally(folder, environments)
    samples = await StoredSamples.find(folder.inputs)
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
    async for line in yield_regularly(folder.read_rollouts()):
        tallies[line["gymsdk"]["environment"]].add(line)
    async for line in yield_regularly(folder.read_failures()):
        tallies[line["gymsdk"]["environment"]].add(line)
    return tallies


async def _summarize(environment: MetricsSource, tally: Tally, read: Callable[[], Iterable[Row]]) -> Row:
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
