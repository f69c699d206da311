"""Measure the CPU time per episode that `gymsdk.trl.rollout_func` takes in the trainer's process.

usage: trl_episodes.py [--checkout DIR] [--steps N] [--episodes N] [--case NAME ...]

A stub of the trainer generates fixed replies at once (`yardstick/trl_steps.py`), so that the figures contain neither a
model nor a training step. The tokenizer is one of transformers with a chat template in the manner of Qwen's. With
--checkout, the same steps run with gymsdk from another source tree, alternating, because the speed of a shared machine
changes: compare the ratio, which is the median over the steps. The first step builds caches and is not counted. The
exit status is 1 if a sample differs between the two source trees, or if the ratio of `tool_call, 1 turn` exceeds its
limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from yardstick.processes import build_environ

PLAYER = Path(__file__).resolve().parent / "yardstick" / "trl_steps.py"
CASES = ("tool_call, 1 turn", "tool_call, 3 turns", "multineedle, 4 turns", "math, 1 turn")
MAX_RATIOS = {"tool_call, 1 turn": 0.25}


class Player:
    """A process that plays steps of one case.

    Args:
        case: The name of the case.
        episodes: The number of episodes of a step.
        checkout: The source tree to import gymsdk from. Empty: the installed one.
        stack: Ends the process.
    """

    def __init__(self, case: str, episodes: int, checkout: str, stack: ExitStack) -> None:
        command = [sys.executable, str(PLAYER), case, str(episodes)]
        environ = os.environ | {"TOKENIZERS_PARALLELISM": "false"} | build_environ(checkout)
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        )
        stack.callback(self._process.kill)
        self.source: str = self._read()["gymsdk"]

    def play(self) -> dict[str, Any]:
        """Play the next step; return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a process that plays episodes ended with status {self._process.wait()}")
        read: dict[str, Any] = json.loads(line)
        return read


def measure(case: str, options: argparse.Namespace) -> bool:
    """Measure a case and print its row; return whether the samples are equal and the ratio is within its limit."""
    checkouts = [options.checkout, ""] if options.checkout else [""]
    with ExitStack() as stack:
        players = [Player(case, options.episodes, checkout, stack) for checkout in checkouts]
        if options.checkout and not players[0].source.startswith(str(Path(options.checkout).resolve())):
            sys.exit(f"{options.checkout} was not imported; gymsdk came from {players[0].source}")
        # All steps count for the comparison of the samples, and all but the first for the times.
        steps = [[player.play() for player in players] for _ in range(options.steps + 1)]
    equal = all(step[0]["digest"] == step[-1]["digest"] for step in steps)
    times = [[1e3 * result["cpu"] / options.episodes for result in step] for step in steps[1:]]
    after = median(step[-1] for step in times)
    name = f"{case:<22}{steps[0][0]['turns']:>6}{median(step[-1]['reward'] for step in steps):>8.2f}"
    if not options.checkout:
        print(f"{name}{after:>9.3f}", flush=True)
        return True
    ratio, limit = median(step[1] / step[0] for step in times), MAX_RATIOS.get(case)
    words = "identical" if equal else "DIFFERENT"
    bound = "" if limit is None else f"  at most {limit}"
    print(f"{name}{median(step[0] for step in times):>9.3f}{after:>9.3f}{ratio:>7.2f}  {words}{bound}", flush=True)
    return equal and (limit is None or ratio <= limit)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", default="", metavar="DIR", help="compare with gymsdk from this source tree")
    parser.add_argument("--steps", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--episodes", type=int, default=256, help="episodes of a step, a multiple of 16")
    parser.add_argument("--case", action="append", choices=CASES, help="measure only this case")
    options = parser.parse_args()
    if find_spec("transformers") is None:
        print("skipped: transformers is not installed")
        return
    print(f"{options.steps} steps of {options.episodes} episodes, 16 of each task; CPU time in ms per episode\n")
    columns = ["before", "after", "  ratio  samples"] if options.checkout else ["CPU"]
    print(f"{'case':<22}{'turns':>6}{'reward':>8}{columns[0]:>9}{''.join(f'{column:>9}' for column in columns[1:])}")
    results = [measure(case, options) for case in options.case or CASES]
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
