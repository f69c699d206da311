"""Train a small model with TRL's GRPOTrainer on an environment of two turns, with a control that does not learn.

usage: trl_grpo.py [--steps N] [--device cpu|cuda] [--plot FILE]

Runs `examples/trl/train.py` and prints the reward curves. Needs `gymsdk[trl]` and torch. The exit status is 1 if the
reward does not rise by 0.4 or the control rises above 0.15.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from grpo import MAX_FROZEN, MIN_RISE, PER_ROW, compute_mean, install_environment, read_curve

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    options = parser.parse_args()
    if find_spec("trl") is None:
        print("skipped: TRL is not installed")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "packages").mkdir()
        variables = install_environment(folder / "packages")
        files = []
        for label, flags in {"trained": (), "frozen": ("--frozen",)}.items():
            began = time.monotonic()
            files.append(folder / f"{label}.jsonl")
            command = [sys.executable, str(EXAMPLES / "trl" / "train.py"), "--steps", str(options.steps), *flags]
            command += ["--device", options.device, "--output", str(files[-1])]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                sys.exit(done.stderr)
            print(f"{label}: {options.steps} steps in {time.monotonic() - began:.0f} s")
        if options.plot is not None:
            plot = [sys.executable, str(EXAMPLES / "grpo" / "plot.py"), str(options.plot), *map(str, files)]
            subprocess.run(plot, check=True)
        trained, frozen = map(read_curve, files)
    print("\nsteps     trained   frozen")
    for start in range(0, options.steps, PER_ROW):
        means = "".join(f"{compute_mean(curve[start : start + PER_ROW]):<10.3f}" for curve in (trained, frozen))
        print(f"{start:<10}{means}")
    rise = compute_mean(trained[-PER_ROW:]) - compute_mean(trained[:PER_ROW])
    print(
        f"\nreward rises by {rise:.2f} (at least {MIN_RISE}); control {compute_mean(frozen):.3f} (below {MAX_FROZEN})"
    )
    if rise < MIN_RISE or compute_mean(frozen) >= MAX_FROZEN:
        sys.exit(1)


if __name__ == "__main__":
    main()
