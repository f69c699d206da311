"""Count how often the checks of `gymsdk trainer check` and `gymsdk tokens check` find an engine that lies.

usage: lying_engines.py [--runs N] [--vllm URL --name MODEL] [--only LIE] [--interface INTERFACE]

Each cell is a lie about ids, text or log-probabilities and a token interface: the number of runs in which a check
fails, of N runs. The last row is the truth: the number of runs in which no check fails. The engine is the test engine,
or with --vllm a real server behind a proxy that changes its answers. The exit status is 1 if a lie is missed or the
truth is not believed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from checks.lying_engine import KINDS, LIES, serve_lying_engine, serve_lying_proxy

import gymsdk
from gymsdk.checks.engine import EngineChecker, list_checks
from gymsdk.checks.results import run_check
from gymsdk.http import client
from gymsdk.testing.templates import TemplateTokenizer

VLLM_INTERFACES = ("vllm-generate", "vllm-completions", "chat")
TRUTH = "the truth"


async def find_failure(url: str, name: str, interface: str) -> str:
    """Return the name of the first check that fails, empty if none does."""
    tokenizer = TemplateTokenizer() if interface == "sglang" else None
    model = gymsdk.model(f"vllm/{name}@{url}", tokens=True, token_interface=interface, tokenizer=tokenizer)
    for check, run in list_checks(EngineChecker(model, tokenizer)):
        result = await run_check(2, check, run)
        if result.outcome == "failed":
            return f"{check}: {result.detail}"
    return ""


def serve(interface: str, lie: str, vllm: str) -> AbstractAsyncContextManager[str]:
    return serve_lying_proxy(vllm, lie) if vllm else serve_lying_engine(interface, lie)


def is_possible(lie: str, interface: str) -> bool:
    """Whether the interface has log-probabilities of prompts that could be wrong, too."""
    return interface != "nemo-rl" or not lie.endswith("scores too")


async def count(lie: str, interface: str, runs: int, vllm: str, name: str) -> int:
    found = 0
    async with serve(interface, "" if lie == TRUTH else lie, vllm) as url:
        for number in range(runs):
            failure = await find_failure(url, name, interface)
            found += bool(failure) != (lie == TRUTH)
            if number == 0 or bool(failure) == (lie == TRUTH):
                sys.stderr.write(f"{lie} | {interface} | {failure or 'no check fails'}\n")
        await client.aclose()
    return found


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--name", default="policy")
    parser.add_argument("--only", default="")
    parser.add_argument("--interface", default="")
    options = parser.parse_args()
    interfaces = VLLM_INTERFACES if options.vllm else tuple(KINDS)
    interfaces = (options.interface,) if options.interface else interfaces
    print(f"{'':28}" + "".join(f"{each:>18}" for each in interfaces))
    missed, started = 0, time.monotonic()
    for lie in (options.only,) if options.only else (*LIES, TRUTH):
        cells = []
        for interface in interfaces:
            if not is_possible(lie, interface):
                cells.append("-")
                continue
            found = await count(lie, interface, options.runs, options.vllm, options.name)
            missed += found != options.runs
            cells.append(f"{found}/{options.runs}")
        print(f"{lie:28}" + "".join(f"{each:>18}" for each in cells), flush=True)
    sys.stderr.write(f"{time.monotonic() - started:.0f} s\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
