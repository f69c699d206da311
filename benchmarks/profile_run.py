"""Show in which parts of the code the measured process spends its CPU time.

usage: profile_run.py [serve|rollout ...] [--in-flight N] [--rollouts N] [--stacks DIR]

py-spy samples the process 200 times a second while it plays tool_call rollouts with the stub model server: `gymsdk
serve` under `/run` requests, or `gymsdk rollout` with a latency of 2 s. Each sample in which a thread runs counts for
the innermost function that belongs to one of the areas below, so that the standard library counts for the code that
calls it. C functions, such as those of orjson and uvloop, have no frame of their own and count for their caller.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from yardstick.client import post_rows
from yardstick.processes import get_agent_url, prepare_process, run_gymsdk_serve, run_stub
from yardstick.rollouts import RolloutRun, run_rollouts
from yardstick.rows import build_rows

RATE = 200
"""Samples per second."""

SAMPLER = Path(sys.executable).with_name("py-spy")
"""The program that samples; pip installs it beside the interpreter."""

MAX_SECONDS = 600
SHOWN_FUNCTIONS = 25
ENVIRONMENT = "tool_call"

AREAS: tuple[tuple[str, str], ...] = (
    ("json", r"gymsdk/jsonl\.py|/orjson/|json/(de|en)coder\.py|json/__init__\.py"),
    ("model client", r"gymsdk/(models|http|convert|router)\b|/aiohttp/|/yarl/|/multidict/|/frozenlist/|/aiosignal/"),
    ("HTTP server protocol", r"/uvicorn/|/httptools/|gymsdk/edge/listener\.py"),
    (
        "application and middleware",
        r"/starlette/|/fastapi/|gymsdk/edge/",
    ),
    ("routes of the agent and the other servers", r"gymsdk/servers/"),
    ("environment package", r"gym_env_"),
    ("environment and hooks", r"gymsdk/(environment|tools)\.py|gymsdk/plugins/|/pluggy/"),
    ("validation", r"/pydantic/"),
    ("episode loop", r"gymsdk/(episode|responses|types|errors)\.py"),
    ("deadlines and threads", r"gymsdk/(concurrency|tracing)\.py|gymsdk/workers/"),
    ("logs and metrics", r"gymsdk/observability/|/logging/|prometheus_client/"),
    ("rollout jobs and files", r"gymsdk/rollouts/|gymsdk/metrics\.py"),
    # uvloop has no frames, so that its time appears in the function that runs the loop.
    (
        "event loop and sockets",
        r"asyncio/|/uvloop/|selectors\.py|/ssl\.py|socket\.py|gymsdk/(sockets|memory|cli/process|deploy/distributor)\.py",
    ),
    ("command line", r"gymsdk/cli/|/rich/|/typer/|/click/"),
)
"""The areas, with a pattern for the paths of their source files, which py-spy shortens to the part below site-packages.
The first pattern that matches counts."""

OTHER = "other"
FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*):\d+\)$")
THROUGH = re.compile(r"(^|/)(asyncio/(tasks|futures|events|base_events|runners|locks|timeouts|taskgroups|queues)\.py)$")
"""Files of the event loop that run the code of others: their time counts for the code that calls them, if any."""


def classify(frames: list[str]) -> tuple[str, str]:
    """Return the area of a sample, and the innermost function.

    Args:
        frames: The call stack from the outermost to the innermost function, as `NAME (FILE:LINE)`.
    """
    parsed = [found for frame in reversed(frames) if (found := FRAME.match(frame))]
    innermost = f"{parsed[0]['function']} ({'/'.join(parsed[0]['file'].split('/')[-3:])})" if parsed else "?"
    for found in parsed:
        if not THROUGH.search(found["file"]):
            for area, pattern in AREAS:
                if re.search(pattern, "/" + found["file"]):
                    return area, innermost
    return OTHER, innermost


@contextmanager
def sample(pid: int, output: Path) -> Iterator[None]:
    """Sample the process while the context is open, and write the call stacks to *output*."""
    command = [str(SAMPLER), "record", "--pid", str(pid), "--rate", str(RATE)]
    options = ["--format", "raw", "--duration", str(MAX_SECONDS), "--output", str(output)]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as sampler:
        try:
            yield
        finally:
            # py-spy writes its file when it is interrupted, or when the process ends.
            sampler.send_signal(signal.SIGINT)
            _, messages = sampler.communicate()
    if not output.exists():
        sys.exit(f"py-spy could not sample the process, which needs the right to trace it (SYS_PTRACE): {messages}")


def show_profile(title: str, stacks: Path, output: TextIO) -> None:
    """Print the share of the samples by area, and the functions with the most samples."""
    areas: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        area, innermost = classify(stack.split(";"))
        areas[area] += int(count)
        functions[innermost] += int(count)
    total = areas.total()
    print(f"{title}, {total} samples", file=output)
    for area, samples in areas.most_common():
        print(f"  {100 * samples / total:5.1f} %  {area}", file=output)
    print("functions with the most samples, without the functions that they call", file=output)
    for function, samples in functions.most_common(SHOWN_FUNCTIONS):
        print(f"  {100 * samples / total:5.1f} %  {function}", file=output)
    print(file=output, flush=True)


def profile_serve(in_flight: int, rollouts: int, stacks: Path) -> str:
    """Sample `gymsdk serve` under `/run` requests; return a description of the load."""
    rows = build_rows(ENVIRONMENT, rollouts)
    with run_stub() as stub, run_gymsdk_serve(ENVIRONMENT, f"{stub}/v1") as server:
        url = get_agent_url(server, ENVIRONMENT)
        post_rows(url, rows[:in_flight], in_flight)
        before = server.tree.read_cpu()
        with sample(server.tree.pid, stacks):
            outcome = post_rows(url, rows, in_flight)
        cpu = 1e3 * (server.tree.read_cpu() - before) / rollouts
    failed = f", failed {dict(outcome.failed)}" if outcome.failed else ""
    return f"gymsdk serve tool_call, /run, {in_flight} in flight, {rollouts} rollouts, {cpu:.2f} ms of CPU each{failed}"


def profile_rollout(in_flight: int, rollouts: int, stacks: Path) -> str:
    """Sample `gymsdk rollout` from its start to its end; return a description of the load."""
    with run_stub() as stub, ExitStack() as stack:

        def start_sampling(pid: int) -> None:
            stack.enter_context(sample(pid, stacks))

        run: RolloutRun = run_rollouts(f"{stub}/latency2000/v1", in_flight, rollouts, on_start=start_sampling)
    cpu = 1e3 * run.cpu / rollouts
    return f"gymsdk rollout tool_call, {in_flight} in flight, {rollouts} rollouts, {cpu:.2f} ms of CPU each"


LOADS = {"serve": (profile_serve, 512, 6000), "rollout": (profile_rollout, 4096, 4096)}
"""What to sample, with the default number of requests in flight and of rollouts."""


def main() -> None:
    """Print the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="serve, rollout or both (default)")
    parser.add_argument(
        "--in-flight", type=int, help="requests or rollouts in flight (default: 512 for serve, else 4096)"
    )
    parser.add_argument("--rollouts", type=int, help="rollouts to play (default: 6000 for serve, else 4096)")
    parser.add_argument("--stacks", type=Path, metavar="DIR", help="keep the sampled call stacks in this folder")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.what if name not in LOADS]:
        parser.error(f"{unknown[0]!r} cannot be sampled; name {' or '.join(LOADS)}")
    if not SAMPLER.exists():
        print(f"{parser.prog} needs py-spy: install it with `{sys.executable} -m pip install py-spy`", file=sys.stderr)
        sys.exit(2)
    prepare_process()
    for what in arguments.what or LOADS:
        profile, in_flight, rollouts = LOADS[what]
        with tempfile.TemporaryDirectory() as folder:
            stacks = Path(arguments.stacks or folder, f"{what}.txt")
            title = profile(arguments.in_flight or in_flight, arguments.rollouts or rollouts, stacks)
            show_profile(title, stacks, sys.stdout)


if __name__ == "__main__":
    main()
