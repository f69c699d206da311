"""Count how often the checks of `gymsdk trainer check` and `gymsdk tokens check` find an engine that lies.

usage: lying_engines.py [--runs N] [--vllm URL --name MODEL] [--only LIE] [--interface INTERFACE] [--updates]

Each cell is a lie about ids, text or log-probabilities and a token interface: the number of runs in which a check
fails, of N runs. The last row is the truth: the number of runs in which no check fails. The engine is the test engine,
or with --vllm a real server behind a proxy that changes its answers. The exit status is 1 if a lie is missed or the
truth is not believed. --updates shows updates of weights instead, with the whole of `gymsdk trainer check` and a small
generation server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from checks.lying_engine import (  # type: ignore[import-not-found]  # on the path only when the script runs
    KINDS,
    LIES,
    TOKENIZES_AGAIN,
    serve_lying_engine,
    serve_lying_proxy,
)
from checks.test_trainer import (  # type: ignore[import-not-found]  # as above
    GenerationServer,
    check,
    list_failed,
)

import gymsdk
from gymsdk.checks.engine import EngineChecker, list_checks
from gymsdk.checks.results import run_check
from gymsdk.http import client
from gymsdk.testing.templates import TemplateTokenizer

VLLM_INTERFACES = ("vllm-generate", "vllm-completions", "chat")
TRUTH = "the truth"
UPDATES = {
    "changes nothing": GenerationServer(updates=False),
    "changes nothing, with noise": GenerationServer(updates=False, jitters=True),
    "changes the reported values only": GenerationServer(update_lies=True),
    TRUTH: GenerationServer(),
    f"{TRUTH}, with noise": GenerationServer(jitters=True),
}
UPDATE_CHECK = "uses new weights after an update"


async def find_failure(url: str, name: str, interface: str) -> str:
    """Return the name of the first check that fails, empty if none does."""
    tokenizer = TemplateTokenizer() if interface == "sglang" else None
    model: Any = gymsdk.model(f"vllm/{name}@{url}", tokens=True, token_interface=interface, tokenizer=tokenizer)
    for title, run in list_checks(EngineChecker(model, tokenizer)):
        result = await run_check(2, title, run)
        if result.outcome == "failed":
            return f"{title}: {result.detail}"
    return ""


def serve(interface: str, lie: str, vllm: str) -> AbstractAsyncContextManager[str]:
    served: AbstractAsyncContextManager[str] = (
        serve_lying_proxy(vllm, lie) if vllm else serve_lying_engine(interface, lie)
    )
    return served


def is_possible(lie: str, interface: str) -> bool:
    """Whether the interface has log-probabilities of prompts, or takes the ids, that the lie is about."""
    if lie == TOKENIZES_AGAIN:
        return interface == "vllm-completions"
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


async def count_updates(runs: int) -> int:
    """Print how often the check of an update finds each kind of server; return how many kinds it gets wrong."""
    missed = 0
    for name, server in UPDATES.items():
        found = 0
        for seed in range(runs):
            failed = list_failed(await check(replace(server, rng=random.Random(seed))))
            found += (failed == []) if name.startswith(TRUTH) else (failed == [UPDATE_CHECK])
        missed += found != runs
        print(f"{name:36}{found}/{runs}", flush=True)
    return missed


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--name", default="policy")
    parser.add_argument("--only", default="")
    parser.add_argument("--interface", default="")
    parser.add_argument("--updates", action="store_true")
    options = parser.parse_args()
    if options.updates:
        return int(await count_updates(options.runs) > 0)
    interfaces = VLLM_INTERFACES if options.vllm else tuple(KINDS)
    interfaces = (options.interface,) if options.interface else interfaces
    print(f"{'':28}" + "".join(f"{interface:>18}" for interface in interfaces))
    missed, started = 0, time.monotonic()
    lies = (*LIES, *((TOKENIZES_AGAIN,) if options.vllm else ()), TRUTH)
    for lie in (options.only,) if options.only else lies:
        cells = []
        for interface in interfaces:
            if not is_possible(lie, interface):
                cells.append("-")
                continue
            found = await count(lie, interface, options.runs, options.vllm, options.name)
            missed += found != options.runs
            cells.append(f"{found}/{options.runs}")
        print(f"{lie:28}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    sys.stderr.write(f"{time.monotonic() - started:.0f} s\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
