"""The conformance kit over every generator of reasoning-gym: a table of what was found.

Run as `python sweep.py [NAME ...]`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import gym_env_reasoning_gym

from gymsdk import Environment
from gymsdk.checks import run
from gymsdk.checks.report import Check, Result
from gymsdk.checks.run import CheckRun
from gymsdk.checks.subject import Subject

CHECKS = ("semantic.oracle_max", "semantic.floor_gap", "semantic.canary_floor", "semantic.verifier_determinism")
CHECKS += ("semantic.no_solution_leakage", "runtime.seed_control")
MARKS = {"passed": "ok", "failed": "FAIL", "skipped": "-"}
SECONDS = 180.0
"""Seconds one check of one generator may take."""

MOST = 3
"""Findings of one check and generator that are told."""


def names() -> list[str]:
    """Give every generator that needs no other."""
    from reasoning_gym.factory import DATASETS

    return sorted(name for name in DATASETS if name != "composite")


def checks() -> list[Check]:
    """Give the checks in the order of the columns, with time for generators that are slow."""
    return [replace(check, seconds=SECONDS) for name in CHECKS for check in run.select_checks([name])]


def subject(name: str) -> Subject:
    """Give the generator *name* as what the checks look at."""
    make = partial(Environment, "reasoning_gym", gym_env_reasoning_gym, {"dataset": name})
    return Subject(name, make, count=4, settings={"dataset": name})


async def swept(name: str) -> list[Result]:
    """Print the line of the generator *name*, and give what came of its checks."""
    started = time.perf_counter()
    results = (await CheckRun(subject(name)).report(checks())).results
    marks = " ".join(f"{MARKS[result.status]:>6}" for result in results)
    print(f"{name:<30} {marks} {time.perf_counter() - started:7.1f} s", flush=True)
    return results


def told(found: dict[str, list[Result]]) -> None:
    """Print every finding in a sentence."""
    for name, results in found.items():
        for result in results:
            sentences = [f"  {finding.seen}" for finding in result.findings]
            if sentences:
                more = [f"  and {len(sentences) - MOST} more"] if len(sentences) > MOST else []
                print("\n".join(["", f"{name}: {result.id}", *sentences[:MOST], *more]))


async def main() -> None:
    """Sweep over the generators named on the command line, all where none is."""
    chosen = sys.argv[1:] or names()
    columns = checks()
    print(f"reasoning-gym {version('reasoning-gym')}, {len(chosen)} generators; columns:")
    print("\n".join(f"  {check.id}: {check.asks}" for check in columns) + "\n")
    found = {name: await swept(name) for name in chosen}
    failed = Counter(result.id for results in found.values() for result in results if result.status == "failed")
    print("\n" + "\n".join(f"{failed[check.id]:4} fail {check.id}" for check in columns))
    told(found)


asyncio.run(main())
