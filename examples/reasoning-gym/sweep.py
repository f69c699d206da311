"""Run the conformance checks on every generator of reasoning-gym and print a table of the results.

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
"""The time limit for one check of one generator."""

MAX_FINDINGS = 3
"""The maximum number of findings to print per check and generator."""


def generator_names() -> list[str]:
    """Return the names of all generators that do not depend on other generators."""
    from reasoning_gym.factory import DATASETS

    return sorted(name for name in DATASETS if name != "composite")


def checks() -> list[Check]:
    """Return the checks in the order of the columns, with a time limit that suits slow generators."""
    return [replace(check, seconds=SECONDS) for name in CHECKS for check in run.select_checks([name])]


def build_subject(name: str) -> Subject:
    """Build the subject of the checks from the generator *name*."""
    make = partial(Environment, "reasoning_gym", gym_env_reasoning_gym, {"dataset": name})
    return Subject(name, make, count=4, settings={"dataset": name})


async def check_generator(name: str) -> list[Result]:
    """Check the generator *name*, print its line of the table, and return the results."""
    started = time.perf_counter()
    results = (await CheckRun(build_subject(name)).report(checks())).results
    marks = " ".join(f"{MARKS[result.status]:>6}" for result in results)
    print(f"{name:<30} {marks} {time.perf_counter() - started:7.1f} s", flush=True)
    return results


def print_findings(found: dict[str, list[Result]]) -> None:
    """Print the findings of all generators, up to `MAX_FINDINGS` per check."""
    for name, results in found.items():
        for result in results:
            sentences = [f"  {finding.problem}" for finding in result.findings]
            if sentences:
                more = [f"  and {len(sentences) - MAX_FINDINGS} more"] if len(sentences) > MAX_FINDINGS else []
                print("\n".join(["", f"{name}: {result.id}", *sentences[:MAX_FINDINGS], *more]))


async def main() -> None:
    """Check the generators named on the command line, or all generators."""
    chosen = sys.argv[1:] or generator_names()
    columns = checks()
    print(f"reasoning-gym {version('reasoning-gym')}, {len(chosen)} generators; columns:")
    print("\n".join(f"  {check.id}: {check.requirement}" for check in columns) + "\n")
    found = {name: await check_generator(name) for name in chosen}
    failed = Counter(result.id for results in found.values() for result in results if result.status == "failed")
    print("\n" + "\n".join(f"{failed[check.id]:4} fail {check.id}" for check in columns))
    print_findings(found)


asyncio.run(main())
