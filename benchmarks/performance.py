"""Measure what gymsdk costs per rollout, compared with the floor: the same work without a framework.

usage: performance.py [--row NAME ...] [--json FILE] [--repeats N] [--scale F] [--checkout DIR] [--peer NAME=PYTHON]

The floor is one asyncio process with uvloop and aiohttp. It runs in the same run, alternating with gymsdk, because the
speed of a shared machine changes: compare the ratios. The pair of the floor and gymsdk with the median ratio counts.
CPU time is user and system time of all server processes with their graders, without the stub model server
and the client. The exit status is 1 if a limit is exceeded or a peer fails. All rows together, without peers, take less
than 15 minutes on two cores.

How the rows are measured:

- math-512, math-cold, tool-512, tool-2048: `gymsdk serve` with the stub as its model, and 512 or 2,048 `/run` requests
  in flight. math-512 plays 3,000 rows with 800 different pairs of an expected answer and an answer, as in a training
  run, where the samples of a task have the same expected answer and often the same answer. math-cold plays only the
  first 800 rows, so that nearly all pairs are new, as in an evaluation with one sample per task. The servers have
  graded 64 other rows before; every reward is compared with the known one.
- rollout: `gymsdk rollout tool_call` against a model with a latency of 2 s, with the rows that the environment
  generates (14 tools each; two model calls and one tool call per rollout). The CPU time per rollout is the marginal
  one: of a run minus that of a run with 64 rollouts, so that imports do not count. With 64 in flight, 1,024 rollouts
  take about 64 s whatever their CPU time is, because each waits for two model calls; a shorter latency would be
  faster but would change the number of timers that expire during a rollout, so the latency stays the same and the
  number of rollouts is small. With 4,096 and 16,384 in flight, all rollouts start at once. A stall is the time by
  which a timer of the run's event loop is late.
- run-8192: 8,192 `/run` requests at once on one process, without retries, while another process requests `/livez` ten
  times a second from every server on new connections.
- separate: as tool-512 with `--separate`; the requests are those that the servers answer, from their `/metrics`. The
  stub answers two more.
- turns: episodes of 200 tool calls with 2 kB each, one at a time. The stub reads the CPU clock of the server at each
  model request. The floor is the same conversation with aiohttp: its cost grows with the history, which is sent in
  full at every turn. What gymsdk adds to it must not grow.
- tokens: one turn with 65,536 token ids and log-probabilities, from the model's response to the response of `/run`. The
  floor is to parse the first and to serialize the second once. With `--separate` it is three times as much: the proxy,
  the agent and the resources server each parse the response; the proxy serializes it once and the agent twice, for
  `/verify` and for the response of `/run`.
- workers: tool-512 with `--workers 2`, compared with one worker; and 1,000 sessions with a new connection per request.
- peers: tool_call rollouts with 64 in flight in other frameworks, from this interpreter or the one that --peer names,
  and directly after it the same on `gymsdk serve`.
  The CPU time includes the child processes of the framework. Frameworks that are not installed are skipped. The
  verifiers package starts a process per rollout and needs about 2 s of CPU for it, so it plays fewer rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import orjson
from yardstick.client import fetch, post_rows
from yardstick.figures import Failed, Figure, Skipped, format_figure, format_table
from yardstick.health import probe_health
from yardstick.measure import (
    combine,
    compare_run,
    compute_rate,
    count_wrong_sessions,
    find_median_pair,
    get_pids,
    measure_floor,
    measure_run,
    read_turns,
)
from yardstick.peers import Peer, PeerError, run_peer
from yardstick.processes import (
    Server,
    build_environ,
    get_agent_url,
    prepare_process,
    run_floor,
    run_gymsdk_serve,
    run_stub,
    sample_peak_memory,
)
from yardstick.rollouts import run_rollouts
from yardstick.rows import ANSWERS, build_rows

HERE = Path(__file__).parent
MIB = 2**20
TOOL = "tool_call"
LATENCY = "/latency2000"
FEW = 64
"""The number of rollouts of a run that is measured to subtract the cost of its start."""

TOOL_PAIRS = 4
"""How often the floor and gymsdk alternate in the rows tool-512 and tool-2048 for each repeat.

The CPU time of the floor varies between 0.15 and 0.29 ms per rollout on the same machine.
"""

OVERLOAD = 8192
MAX_HEALTH_SECONDS = 1.0
MAX_STALL_MS = 100
MAX_MEMORY_MIB = 1536
TURNS = 200
EPISODES = 12
TURN_WINDOWS = {"turn 10": (5, 15), "turn 200": (189, 199)}
"""The numbers of tool outputs in the first and the last model request between which the CPU time is read."""

CONTROL_ROUTES = ('route="/livez"', 'route="/readyz"', 'route="/metrics"')
"""The routes that no rollout requests."""

TOKENS = 65_536
SESSIONS = 1000
PEERS = {
    "inspect_ai": Peer("inspect_ai_peer.py", 500),
    "verifiers": Peer("verifiers_peer.py", 64),
    "nemo_gym": Peer("nemo_gym_peer.py", 500),
}
"""The peers by the name of their package on PyPI, with underscores."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        stub: The URL of the stub model server.
        repeats: The number of times to measure each load.
        scale: The factor for the numbers of rollouts; below 1 for a quick look.
        checkout: The source tree to import gymsdk from. Default: the installed one.
        interpreters: The Python interpreters of the peers by name.
    """

    stub: str
    repeats: int
    scale: float
    checkout: str
    interpreters: dict[str, str]

    def serve(self, environment: str, base_url: str, *options: str) -> AbstractContextManager[Server]:
        """Run `gymsdk serve` from the checkout."""
        return run_gymsdk_serve(environment, base_url, *options, checkout=self.checkout)

    def scaled(self, number: int) -> int:
        """Return a number of rollouts for the scale."""
        return max(FEW, int(number * self.scale))


def measure_math(row: str, rollouts: int, limit: float | None, settings: Settings) -> Iterator[Figure]:
    """Yield the figures of math with 512 requests in flight, on servers that have graded none of the answers before."""
    rows, in_flight, floors, runs = build_rows("math", settings.scaled(rollouts)), 512, [], []
    warm_up = build_rows("math", FEW, seed=1)
    with run_floor("math", settings.stub) as floor:
        for _ in range(settings.repeats):
            floors.append(measure_floor(floor, len(rows), in_flight))
            with settings.serve("math", f"{settings.stub}/v1") as server:
                measure_run(server, "math", warm_up, FEW)
                runs.append(measure_run(server, "math", rows, in_flight))
    result = combine(floors, runs)
    yield Figure(row, "CPU per rollout", result.cpu, "ms", result.floor, limit)
    yield Figure(row, "rollouts per second", result.rate)
    yield Figure(row, "wrong rewards and failures", result.errors, limit=0)


def measure_tool(row: str, rollouts: int, in_flight: int, settings: Settings) -> Iterator[Figure]:
    """Yield the figures of tool_call with *in_flight* requests in flight."""
    with run_floor(TOOL, settings.stub) as floor, settings.serve(TOOL, f"{settings.stub}/v1") as server:
        result = compare_run(server, floor, TOOL, settings.scaled(rollouts), in_flight, TOOL_PAIRS * settings.repeats)
    yield Figure(row, "CPU per rollout", result.cpu, "ms", result.floor, 3)
    yield Figure(row, "rollouts per second", result.rate)
    yield Figure(row, "wrong rewards and failures", result.errors, limit=0)


def measure_rollout(settings: Settings) -> Iterator[Figure]:
    """Yield the figures of `gymsdk rollout` with 64, 4,096 and 16,384 rollouts in flight."""
    model = f"{settings.stub}{LATENCY}/v1"
    start = run_rollouts(model, FEW, FEW, checkout=settings.checkout)
    floor = None
    for in_flight, number in ((64, 1024), (4096, 4096), (16_384, 16_384)):
        rollouts = max(2 * FEW, settings.scaled(number))
        run = run_rollouts(model, in_flight, rollouts, checkout=settings.checkout)
        cpu = 1e3 * (run.cpu - start.cpu) / (rollouts - FEW)
        name = f"{in_flight} in flight"
        yield Figure("rollout", f"CPU per rollout, {name}", cpu, "ms", floor, 1.3 if floor else None)
        yield Figure("rollout", f"peak memory, {name}", run.memory / MIB, "MiB", limit=MAX_MEMORY_MIB)
        stall = f"longest stall, {name} ({run.stalled_at:.1f} s after the start)"
        yield Figure("rollout", stall, 1e3 * run.longest_stall, "ms", limit=MAX_STALL_MS)
        yield Figure("rollout", f"not scored, {name}", rollouts - run.outcomes["scored"], limit=0)
        floor = floor or cpu


def measure_overload(settings: Settings) -> Iterator[Figure]:
    """Yield the figures of 8,192 `/run` requests at once on one process."""
    rows = build_rows(TOOL, settings.scaled(OVERLOAD))
    with settings.serve(TOOL, f"{settings.stub}/v1") as server:
        measure_run(server, TOOL, rows[:FEW], FEW)
        urls = [server.ready["head"], *(entry["url"] for entry in server.ready["servers"].values())]
        with probe_health(urls) as latencies, sample_peak_memory(server.tree) as memory:
            cpu, outcome = measure_run(server, TOOL, rows, len(rows))
    row = f"run-{OVERLOAD}"
    yield Figure(row, "requests without a reward", outcome.failed.total(), limit=0)
    yield Figure(row, "wrong rewards", outcome.wrong, limit=0)
    yield Figure(row, "slowest /livez", max(latencies), "s", limit=MAX_HEALTH_SECONDS)
    yield Figure(row, "CPU per rollout", cpu, "ms")
    yield Figure(row, "peak memory", memory[0] / MIB, "MiB")
    yield Figure(row, "slowest /run", max(outcome.latencies, default=0.0), "s")


def measure_separate(settings: Settings) -> Iterator[Figure]:
    """Yield the figures of tool_call with a process for each server."""
    rollouts, in_flight = settings.scaled(2000), 512
    with (
        run_floor(TOOL, settings.stub) as floor,
        settings.serve(TOOL, f"{settings.stub}/v1", "--separate") as server,
    ):
        before = _count_requests(server)
        result = compare_run(server, floor, TOOL, rollouts, in_flight, settings.repeats)
        requests = (_count_requests(server) - before) / (rollouts * settings.repeats + in_flight)
    yield Figure("separate", "CPU per rollout", result.cpu, "ms", limit=3)
    yield Figure("separate", "CPU per rollout of the floor", result.floor, "ms")
    yield Figure("separate", "requests to the servers per rollout", requests)
    yield Figure("separate", "wrong rewards and failures", result.errors, limit=0)


def _count_requests(server: Server) -> float:
    """Return the number of POST requests that the servers have answered."""
    lines = [
        line
        for entry in server.ready["servers"].values()
        for line in fetch(f"{entry['url']}/metrics").decode().splitlines()
        if line.startswith("gymsdk_requests_total") and not any(route in line for route in CONTROL_ROUTES)
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def measure_turns(settings: Settings) -> Iterator[Figure]:
    """Yield the CPU time per turn at the beginning and at the end of episodes of 200 turns."""
    episodes, model = max(2, int(EPISODES * settings.scale)), f"{settings.stub}/turns{TURNS}"
    row, ours, floors, failed = build_rows(TOOL, 1), [], [], 0
    limits = ["--turns", str(2 * TURNS), "--tool-calls", str(2 * TURNS)]
    with run_floor(TOOL, settings.stub) as floor, settings.serve(TOOL, f"{model}/v1", *limits) as server:
        for _ in range(episodes):
            fetch(f"{settings.stub}/watch/{floor.tree.pid}")
            floor.exchange({"rollouts": 1, "in_flight": 1, "turns": TURNS})
            floors += orjson.loads(fetch(f"{settings.stub}/turns"))
            fetch(f"{settings.stub}/watch/{get_pids(server.tree)}")
            failed += post_rows(get_agent_url(server, TOOL), row, 1).failed.total()
            ours += orjson.loads(fetch(f"{settings.stub}/turns"))
        fetch(f"{settings.stub}/watch/")
    added = []
    for name, (first, last) in TURN_WINDOWS.items():
        cpu, least = read_turns(ours, first, last), read_turns(floors, first, last)
        added.append(cpu - least)
        yield Figure("turns", f"CPU of a turn at {name}", cpu, "ms", least)
    yield Figure("turns", "CPU that gymsdk adds, at turn 200 relative to turn 10", added[1], "ms", added[0], 1.5)
    yield Figure("turns", "failed episodes", failed, limit=0)


def measure_tokens(settings: Settings) -> Iterator[Figure]:
    """Yield the CPU time of one turn with 65,536 token ids and log-probabilities."""
    model, calls = f"{settings.stub}/tokens{TOKENS}", max(3, int(10 * settings.scale))
    row = build_rows(TOOL, 1)[0]
    received = fetch(f"{model}/v1/responses", row.body)
    for name, options, servers in (("one process", (), 1), ("--separate", ("--separate",), 3)):
        with settings.serve(TOOL, f"{model}/v1", *options) as server:
            url = f"{get_agent_url(server, TOOL)}/run"
            rollout = orjson.loads(fetch(url, row.body))
            assert len(rollout["response"]["output"][-1]["generation_token_ids"]) == TOKENS
            floors, values = [], []
            for _ in range(settings.repeats):
                floors.append(servers * _measure_parse_and_dump(received, rollout))
                values.append(_measure_calls(server, url, row.body, calls))
        yield Figure("tokens", f"CPU of a rollout, {name}", min(values), "ms", min(floors), 2)


def _measure_calls(server: Server, url: str, body: bytes, calls: int) -> float:
    before = server.tree.read_cpu()
    for _ in range(calls):
        fetch(url, body)
    return 1e3 * (server.tree.read_cpu() - before) / calls


def _measure_parse_and_dump(received: bytes, sent: object) -> float:
    """Return the CPU time in milliseconds to parse the model's response once and to serialize the rollout once."""
    times = []
    for _ in range(10):
        before = time.process_time()
        orjson.loads(received)
        orjson.dumps(sent)
        times.append(time.process_time() - before)
    return 1e3 * min(times)


def measure_workers(settings: Settings) -> Iterator[Figure | Skipped]:
    """Yield the figures of two workers behind one port, compared with one."""
    command = [sys.executable, "-m", "gymsdk", "serve", "--help"]
    environ = {**os.environ, **build_environ(settings.checkout)}
    if "--workers" not in subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout:
        yield Skipped("workers", "this version has no --workers")
        return
    rollouts, in_flight = settings.scaled(3000), 512
    rows, one, two = build_rows(TOOL, rollouts), [], []
    with (
        settings.serve(TOOL, f"{settings.stub}/v1") as alone,
        settings.serve(TOOL, f"{settings.stub}/v1", "--workers", "2") as both,
    ):
        for server in (alone, both):
            measure_run(server, TOOL, rows[:in_flight], in_flight)
        for _ in range(settings.repeats):
            one.append(measure_run(alone, TOOL, rows, in_flight))
            two.append(measure_run(both, TOOL, rows, in_flight))
        wrong = count_wrong_sessions(both.ready["servers"][TOOL]["url"], settings.scaled(SESSIONS))
    floors = [cpu for cpu, _ in one]
    result, (_, outcome) = combine(floors, two), one[find_median_pair(floors, two)]
    yield Figure("workers", "CPU per rollout with 2, relative to 1", result.cpu, "ms", result.floor, 1.15)
    yield Figure("workers", "rollouts per second", result.rate, "", compute_rate(outcome))
    yield Figure("workers", "wrong rewards and failures", result.errors, limit=0)
    yield Figure("workers", "wrong sessions", wrong, limit=0)


def is_installed(package: str) -> bool:
    """Return whether the package from PyPI is installed; `gymsdk-nemo-compat` also has a module `nemo_gym`."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def measure_peers(settings: Settings) -> Iterator[Figure | Skipped | Failed]:
    """Yield the CPU time of the same tool_call rollouts in other frameworks, where they are installed."""
    in_flight = 64
    for name, peer in PEERS.items():
        rollouts = settings.scaled(peer.rollouts)
        python = settings.interpreters.get(name) or (sys.executable if is_installed(name) else None)
        if python is None:
            yield Skipped("peers", f"{name} is not installed; name an interpreter with --peer {name}=PYTHON")
            continue
        command = [python, str(HERE / "peers" / peer.script), settings.stub, str(rollouts), str(in_flight)]
        try:
            result = run_peer(command)
        except PeerError as error:
            yield Failed("peers", f"{name}: {error}")
            continue
        # gymsdk and the floor are so cheap that a few rollouts would measure their first requests only.
        with run_floor(TOOL, settings.stub) as floor, settings.serve(TOOL, f"{settings.stub}/v1") as server:
            own = compare_run(server, floor, TOOL, settings.scaled(1000), in_flight, settings.repeats)
        yield Figure("peers", f"CPU per rollout, gymsdk beside {name}", own.cpu, "ms", own.floor)
        yield Figure("peers", f"CPU per rollout, {name} {result.version}", result.cpu, "ms", own.floor)
        yield Figure("peers", f"times the CPU of gymsdk, {name} {result.version}", result.cpu / own.cpu)
        yield Figure("peers", f"not scored, {name} {result.version}", rollouts - result.scored)


ROWS: dict[str, Callable[[Settings], Iterator[Figure | Skipped | Failed]]] = {
    "math-512": partial(measure_math, "math-512", 3000, 0.6),
    "math-cold": partial(measure_math, "math-cold", ANSWERS, None),
    "tool-512": partial(measure_tool, "tool-512", 3000, 512),
    "tool-2048": partial(measure_tool, "tool-2048", 4096, 2048),
    "rollout": measure_rollout,
    f"run-{OVERLOAD}": measure_overload,
    "separate": measure_separate,
    "turns": measure_turns,
    "tokens": measure_tokens,
    "workers": measure_workers,
    "peers": measure_peers,
}


def main() -> int:
    """Print the table; return 1 if a limit is exceeded or a peer fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=ROWS, help="measure this row only; can be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--repeats", type=int, default=2, help="measure each load this many times (default: 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the numbers of rollouts by this factor")
    parser.add_argument("--checkout", default="", metavar="DIR", help="import gymsdk from this source tree")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="the interpreter of a peer")
    arguments = parser.parse_args()
    interpreters = dict(peer.partition("=")[::2] for peer in arguments.peer)
    if unknown := [peer for peer in arguments.peer if peer.partition("=")[0] not in PEERS or "=" not in peer]:
        parser.error(f"--peer {unknown[0]}: give NAME=PYTHON with one of the names {', '.join(PEERS)}")
    if arguments.scale <= 0 or arguments.repeats < 1:
        parser.error("--scale must be more than 0, and --repeats at least 1")
    if arguments.scale < 1:
        print("with a --scale below 1, the ratios vary by a third", file=sys.stderr)
    prepare_process()
    figures: list[Figure | Skipped | Failed] = []
    started = time.monotonic()
    try:
        with run_stub() as stub:
            settings = Settings(stub, arguments.repeats, arguments.scale, arguments.checkout, interpreters)
            for row in arguments.row or ROWS:
                for figure in ROWS[row](settings):
                    print(" | ".join(filter(None, format_figure(figure))), file=sys.stderr, flush=True)
                    figures.append(figure)
    finally:
        # Also after Ctrl-C or a row that fails, the rows before it are results.
        print(f"{format_table(figures)}\n\n{time.monotonic() - started:.0f} s", flush=True)
        if arguments.json:
            measured = [figure.to_json() for figure in figures if isinstance(figure, Figure)]
            arguments.json.write_text(json.dumps(measured, indent=2) + "\n")
    return int(any(not figure.is_within_limit for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
