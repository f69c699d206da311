"""Run a child process of a benchmark: the servers, or the endpoint of a scripted policy.

Usage: python -m gymsdk.bench.child serve|policy ...

The process ends together with its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import orjson

from gymsdk.deploy import process_guard
from gymsdk.errors import GymsdkError, UsageError


def main(arguments: Sequence[str]) -> None:
    """Run the servers or the policy until standard input ends or a signal arrives."""
    # The other end of standard input closes however the benchmark ends, also if it is killed.
    process_guard.watch_parent()
    kind, *rest = arguments
    if kind == "serve":
        from gymsdk import cli

        # It ends the process.
        cli.main([kind, *rest])
    try:
        _run_policy(rest[0])
    except GymsdkError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _run_policy(model: str) -> None:
    from gymsdk.cli.process import Stopped, run_until_signal

    try:
        run_until_signal(_serve_model(model))
    except Stopped:
        return


async def _serve_model(name: str) -> None:
    import asyncio

    from gymsdk import testing
    from gymsdk.models.registry import model

    async with testing.serve(testing.build_app(model(name), name=testing.NAME)) as url:
        sys.stdout.buffer.write(orjson.dumps({"url": url, "pid": os.getpid()}) + b"\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
