"""Run the script that plays rollouts with another framework, in the interpreter of that framework."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

PEER_SECONDS = 600
"""Seconds that a peer gets for its rollouts."""


class PeerError(Exception):
    """A peer did not start, failed, took too long or printed no result; the message is one line."""


@dataclass(frozen=True)
class Peer:
    """A framework to compare with.

    Attributes:
        script: The name of the script in `peers/`. It takes STUB_URL ROLLOUTS IN_FLIGHT, and its last line is JSON.
        rollouts: The number of rollouts to play.
    """

    script: str
    rollouts: int


@dataclass(frozen=True)
class PeerResult:
    """What a peer measured.

    Attributes:
        cpu: The CPU time per rollout in milliseconds.
        scored: The number of rollouts that got the right reward.
        version: The version of the framework.
    """

    cpu: float
    scored: int
    version: str


def run_peer(command: Sequence[str], *, seconds: float = PEER_SECONDS) -> PeerResult:
    """Run the script of a peer in a process group of its own and return what it measured.

    Args:
        command: The command line.
        seconds: The time limit in seconds.

    Raises:
        PeerError: There is no result.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    except OSError as error:
        raise PeerError(str(error)) from error
    with process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"no result within {seconds:g} s") from error
        finally:
            # Also the processes that it started must not run on, and these keep its output open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (errors.strip() or out.strip() or "no output").splitlines()[-1]
        raise PeerError(f"exit status {process.returncode}: {last.strip()}")
    try:
        result = json.loads(out.strip().rpartition("\n")[2])
        return PeerResult(float(result["cpu"]), int(result["scored"]), str(result["version"]))
    except (ValueError, TypeError, KeyError) as error:
        raise PeerError(f"the last line is not a result: {out.strip()[-200:]!r}") from error
