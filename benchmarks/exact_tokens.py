"""Count the prompts that do not continue the sampled tokens, and measure the CPU time of a call with token ids.

usage: exact_tokens.py [--conversations N] [--vllm URL --name MODEL]

The first table plays conversations of four calls with the test engine, with each chat template and each token
interface, and over Chat Completions. With --vllm it plays the same conversations with a real server. The second table
compares the CPU time of this process per call, with and without token ids, at 512 calls in flight; engines run in
processes of their own. The third shows the CPU time per turn of a conversation of 200 turns. The exit status is 1 if an
exact interface breaks a conversation or exceeds a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

import gymsdk
from gymsdk import responses, tracing
from gymsdk.http import client
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS
from gymsdk.servers.capture import TokenCapturingModel
from gymsdk.testing.templates import TEMPLATES
from gymsdk.tokens.capture import TokenCaptureFolder
from gymsdk.tracing import LogContext
from gymsdk.types import Item, Model

INTERFACES = ("vllm-generate", "vllm-completions", "nemo-rl", "chat")
ENGINES = {"vllm-generate": "vllm", "vllm-completions": "vllm", "nemo-rl": "nemo-rl", "chat": "vllm"}
CALLS_PER_CONVERSATION = 4
IN_FLIGHT = 512
MAX_CPU_MS = 1.5
"""The limit of the additional CPU time of a call with token ids, in milliseconds on an idle machine."""

LONG_TURNS = 200
WORDS = ("then", "another one", "the answer is in there", "in her hand", "\n\nno", "Zürich 答")
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    for name in ("look", "open_door")
]


@contextmanager
def serve_engine(kind: str, template: str, policy: str = "random", *, pairs: bool = True) -> Iterator[str]:
    """Serve the test engine in another process and yield its base URL.

    With *pairs*, the policy often generates other ids than the tokenizer has for the same text.
    """
    flags = ["--engine", kind, "--chat-template", template, *(["--pairs"] if pairs else []), "--port", "0", "--json"]
    command = [sys.executable, "-m", "gymsdk", "policy", "serve", policy, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


@dataclass
class Tally:
    """The counts of played conversations."""

    continuations: int = 0
    violations: int = 0
    marked: int = 0


async def play(model: Any, seed: int, tally: Tally, *, keep_ids: bool = True) -> None:
    """Play one conversation: the policy's items return, followed by tool outputs or a message."""
    rng = random.Random(seed)
    items: list[Item] = [{"role": "user", "content": f"{rng.choice(WORDS)} {seed}"}]
    ids: list[int] = []
    for _ in range(CALLS_PER_CONVERSATION):
        response = await model.respond({"input": items, "tools": TOOLS, "max_output_tokens": 60})
        output = response["output"]
        carrier = output[-1]
        if TOKEN_FIELDS[0] in carrier:
            tally.continuations += bool(ids)
            tally.violations += carrier[TOKEN_FIELDS[0]][: len(ids)] != ids
            tally.marked += bool(carrier.get(BROKEN_FIELD))
            ids = carrier[TOKEN_FIELDS[0]] + carrier[TOKEN_FIELDS[1]]
        if not keep_ids:
            output = [{key: item[key] for key in item if key not in TOKEN_FIELDS} for item in output]
        called = [item["call_id"] for item in output if item["type"] == "function_call"]
        new = [responses.build_function_call_output(call, rng.choice(WORDS)) for call in called]
        items = [*items, *output, *(new or [{"role": "user", "content": rng.choice(WORDS)}])]


async def play_many(model: Any, count: int, in_flight: int, captured: str = "") -> Tally:
    """Play *count* conversations, *in_flight* at a time; *captured* is a prefix of the ids of captured rollouts."""
    slots, tally = asyncio.Semaphore(in_flight), Tally()

    async def play_one(seed: int) -> None:
        async with slots:
            if captured:
                tracing.set_log_context(LogContext(captured_rollout=f"{captured}-{seed}"))
            await play(model, seed, tally, keep_ids=not captured)

    await asyncio.gather(*(play_one(seed) for seed in range(count)))
    return tally


async def count_violations(url: str, name: str, interface: str, count: int) -> Tally:
    """Return the counts of *count* conversations with the model *name* at *url*."""
    model = gymsdk.model(f"vllm/{name}@{url}", tokens=True, token_interface=interface)
    try:
        return await play_many(model, count, 32)
    finally:
        await client.aclose()


def format_tally(label: Sequence[str], tally: Tally) -> str:
    """Return a row of the first table."""
    share = tally.violations / max(tally.continuations, 1)
    columns = [*label, str(tally.continuations), f"{tally.violations} ({share:.0%})", str(tally.marked)]
    return f"| {' | '.join(columns)} |"


def print_violations(count: int, vllm: str | None, name: str) -> bool:
    """Print the first table and return whether all exact interfaces kept all conversations."""
    print("| engine | template | interface | continuations | violations | marked |")
    print("|---|---|---|---|---|---|")
    kept = True
    for template in TEMPLATES:
        for interface in INTERFACES:
            with serve_engine(ENGINES[interface], template) as url:
                tally = asyncio.run(count_violations(url, "policy", interface, count))
            print(format_tally(["test engine", template, interface], tally), flush=True)
            kept = kept and (interface == "chat" or not (tally.violations or tally.marked))
    for interface in INTERFACES if vllm else ():
        if vllm and interface != "nemo-rl":
            tally = asyncio.run(count_violations(vllm, name, interface, count))
            print(format_tally(["vLLM", name, interface], tally), flush=True)
            kept = kept and (interface == "chat" or not (tally.violations or tally.marked))
    return kept


async def measure_cpu(url: str, interface: str | None, folder: Path | None = None) -> float:
    """Return the milliseconds of CPU time per call at `IN_FLIGHT` calls in flight; the least of three runs.

    With a *folder* for captured token ids, the conversations return without ids.
    """
    options: dict[str, Any] = {"tokens": True, "token_interface": interface} if interface else {}
    model: Model = gymsdk.model(f"vllm/policy@{url}", **options)
    if folder is not None:
        model = TokenCapturingModel(model, TokenCaptureFolder(folder))
    measured = []
    try:
        await play_many(model, 32, 32)
        for number in range(3):
            before = time.process_time()
            tally = await play_many(model, IN_FLIGHT, IN_FLIGHT, f"r{number}" if folder else "")
            assert interface in {None, "chat"} or not tally.violations
            measured.append((time.process_time() - before) * 1e3 / IN_FLIGHT / CALLS_PER_CONVERSATION)
    finally:
        await client.aclose()
    return min(measured)


def print_cpu() -> bool:
    """Print the second table and return whether the limit is kept."""
    print(f"\nCPU of this process per call, {IN_FLIGHT} in flight")
    with serve_engine("vllm", "qwen") as url:
        plain = asyncio.run(measure_cpu(url, None))
        print(f"Chat Completions without token ids  {plain:6.2f} ms")
        within = True
        for interface in ("chat", "vllm-completions", "vllm-generate"):
            measured = asyncio.run(measure_cpu(url, interface))
            requests = {"chat": 1, "vllm-completions": 2, "vllm-generate": 3}[interface]
            exceeded = interface == "vllm-completions" and measured - plain > MAX_CPU_MS
            print(
                f"{interface:<34}  {measured:6.2f} ms, {measured - plain:5.2f} ms more, {requests} requests a call"
                + ("  EXCEEDED" if exceeded else "")
            )
            within = within and not exceeded
        with TemporaryDirectory() as folder:
            captured = asyncio.run(measure_cpu(url, "vllm-completions", Path(folder)))
        print(f"{'vllm-completions, captured ids':<34}  {captured:6.2f} ms, {captured - plain:5.2f} ms more")
    return within


async def measure_long(url: str, interface: str) -> list[tuple[float, int]]:
    """Return the CPU time in milliseconds and the number of prompt ids of each turn of a long conversation."""
    model: Any = gymsdk.model(f"vllm/policy@{url}", tokens=True, token_interface=interface)
    items: list[Item] = [{"role": "user", "content": "begin"}]
    turns = []
    try:
        for number in range(LONG_TURNS):
            before = time.process_time()
            response = await model.respond({"input": items, "tools": TOOLS})
            elapsed = (time.process_time() - before) * 1e3
            turns.append((elapsed, len(response["output"][-1][TOKEN_FIELDS[0]])))
            items = [*items, *response["output"], {"role": "user", "content": f"turn {number} then go on"}]
    finally:
        await client.aclose()
    return turns


def print_long() -> None:
    """Print the third table."""
    print(f"\nCPU of this process per turn of one conversation of {LONG_TURNS} turns")
    for pairs in (False, True):
        print(
            "the policy generates other ids than the tokenizer" if pairs else "the policy generates the tokenizer's ids"
        )
        with serve_engine("vllm", "qwen", "echo", pairs=pairs) as url:
            for interface in ("chat", "vllm-completions", "vllm-generate"):
                turns = asyncio.run(measure_long(url, interface))
                parts = []
                for start in (10, 100, 190):
                    window = sorted(turns[start : start + 10])
                    parts.append(f"turn {start}: {window[5][0]:6.2f} ms ({turns[start][1]} prompt ids)")
                print(f"{interface:<18}  {'   '.join(parts)}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--vllm", help="base URL of a real server")
    parser.add_argument("--name", default="tiny", help="name of its model")
    arguments = parser.parse_args()
    kept = print_violations(arguments.conversations, arguments.vllm, arguments.name)
    within = print_cpu()
    print_long()
    sys.exit(not (kept and within))


if __name__ == "__main__":
    main()
