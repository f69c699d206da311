"""Measure the CPU time of a load on `gymsdk serve`, alternating with the same load on the floor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
import uvloop

from .client import Outcome, connect, post_rows
from .processes import ProcessTree, Server, get_agent_url
from .rows import Row, build_rows

NOTE_ROW = orjson.dumps({"responses_create_params": {"input": [{"role": "user", "content": "Keep a note for me."}]}})
SESSIONS_AT_ONCE = 100


@dataclass(frozen=True)
class Comparison:
    """The CPU time of gymsdk and of the floor.

    Attributes:
        cpu: The CPU time of the servers per rollout in milliseconds, of the pair with the median ratio.
        floor: The CPU time of the floor per rollout in milliseconds, of the same pair.
        wrong: The number of rewards of gymsdk that differ from the known reward.
        failed: The number of requests without a reward.
        rate: The number of rollouts per second of gymsdk, of the same pair.
    """

    cpu: float
    floor: float
    wrong: int
    failed: int
    rate: float

    @property
    def errors(self) -> int:
        """The number of wrong rewards and of requests without a reward."""
        return self.wrong + self.failed


def measure_run(server: Server, environment: str, rows: Sequence[Row], in_flight: int) -> tuple[float, Outcome]:
    """Return the CPU time of the servers per `/run` request in milliseconds, and the outcome of the requests."""
    before = server.tree.read_cpu()
    outcome = post_rows(get_agent_url(server, environment), rows, in_flight)
    return 1e3 * (server.tree.read_cpu() - before) / len(rows), outcome


def measure_floor(floor: Server, rollouts: int, in_flight: int) -> float:
    """Return the CPU time of the floor per rollout in milliseconds.

    Raises:
        RuntimeError: The floor computed a wrong reward, so its work is not the same.
    """
    before = floor.tree.read_cpu()
    outcome = floor.exchange({"rollouts": rollouts, "in_flight": in_flight})
    if outcome["wrong"]:
        raise RuntimeError(f"{outcome['wrong']} of {rollouts} rewards of the floor are wrong; check its grader")
    return 1e3 * (floor.tree.read_cpu() - before) / rollouts


def compare_run(
    server: Server, floor: Server, environment: str, rollouts: int, in_flight: int, repeats: int
) -> Comparison:
    """Measure the floor and gymsdk in turn, *repeats* times each, after a warm-up."""
    rows = build_rows(environment, rollouts)
    measure_floor(floor, in_flight, in_flight)
    measure_run(server, environment, rows[:in_flight], in_flight)
    floors, runs = [], []
    for _ in range(repeats):
        floors.append(measure_floor(floor, rollouts, in_flight))
        runs.append(measure_run(server, environment, rows, in_flight))
    return combine(floors, runs)


def combine(floors: Sequence[float], runs: Sequence[tuple[float, Outcome]]) -> Comparison:
    """Return the figures of the pair with the median ratio, and the sums of the wrong and failed requests.

    The speed of a shared machine changes from one second to the next. A floor and a run that follow one another have
    nearly the same speed, and the median ignores the pairs between which it changed.
    """
    outcomes = [outcome for _, outcome in runs]
    median = find_median_pair(floors, runs)
    cpu, outcome = runs[median]
    return Comparison(
        cpu=cpu,
        floor=floors[median],
        wrong=sum(outcome.wrong for outcome in outcomes),
        failed=sum(outcome.failed.total() for outcome in outcomes),
        rate=compute_rate(outcome),
    )


def find_median_pair(floors: Sequence[float], runs: Sequence[tuple[float, Outcome]]) -> int:
    """Return the number of the pair in which the ratio of the CPU times is the median."""
    ratios = [cpu / floor for (cpu, _), floor in zip(runs, floors, strict=True)]
    return sorted(range(len(ratios)), key=ratios.__getitem__)[len(ratios) // 2]


def compute_rate(outcome: Outcome) -> float:
    """Return the number of rollouts per second."""
    return outcome.requests / outcome.seconds


def count_wrong_sessions(url: str, sessions: int) -> int:
    """Return the number of sessions of a tool_call resources server that lose a note or show one of another session.

    Each session writes two notes and searches for both. Every request uses a new connection, so that with several
    workers behind the port, a request may reach a worker that does not hold the session.
    """
    return uvloop.run(_count_wrong_sessions(url, sessions))


async def _count_wrong_sessions(url: str, sessions: int) -> int:
    slots = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def play(number: int) -> bool:
        async with slots:
            return await _is_session_wrong(url, number)

    return sum(await asyncio.gather(*map(play, range(sessions))))


async def _is_session_wrong(url: str, number: int) -> bool:
    head, _ = await _post_once(url, b"/seed_session", NOTE_ROW)
    start = head.lower().find(b"set-cookie:") + len(b"set-cookie:")
    cookie = b"cookie: %s\r\n" % head[start:].partition(b";")[0].strip()
    titles = [f"note {number} {part}" for part in ("first", "second")]
    for title in titles:
        await _post_once(url, b"/write_note", orjson.dumps({"title": title, "text": "keepsake"}), cookie)
    _, body = await _post_once(url, b"/find_notes", orjson.dumps({"words": "keepsake"}), cookie)
    return body.count(b"keepsake") != len(titles) or not all(title.encode() in body for title in titles)


async def _post_once(url: str, path: bytes, body: bytes, headers: bytes = b"") -> tuple[bytes, bytes]:
    """Post on a new connection and return the head and the body of the response."""
    connection = await connect(url)
    try:
        return await connection.send(b"POST", path, body, headers + b"connection: close\r\n")
    finally:
        connection.transport.close()


def read_turns(records: Sequence[tuple[int, float]], first: int, last: int) -> float:
    """Return the mean CPU time in milliseconds per turn between the requests with *first* and *last* tool outputs.

    Args:
        records: Pairs of the number of tool outputs in a request and the CPU time at its arrival in seconds, of several
            episodes that were played one after the other. The lowest episode counts.
        first: The number of tool outputs in the first request.
        last: The number of tool outputs in the last request.
    """
    begins = [cpu for outputs, cpu in records if outputs == first]
    ends = [cpu for outputs, cpu in records if outputs == last]
    return min(1e3 * (end - begin) / (last - first) for begin, end in zip(begins, ends, strict=True))


def get_pids(tree: ProcessTree) -> str:
    """Return the process ids of a tree for the stub's `/watch` route."""
    return ",".join(map(str, tree.list_pids()))
