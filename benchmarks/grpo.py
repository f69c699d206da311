"""Train the policy of `examples/grpo` through gymsdk's servers, with its two controls.

usage: grpo.py [--steps N] [--plot FILE]

Prints the reward curve of the trained policy, of one that does not learn, and what happens without weight updates.
Needs torch. If `GYMSDK_VLLM_PYTHON` names an interpreter with vLLM, the same follows on vLLM, and with the tools of
`tool_call`; this needs transformers. The exit status is 1 if the reward does not rise by 0.4, the control's reward is
above its limit, trainer and generator differ by more than 1e-4, or missing weight updates go unnoticed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo"
MIN_RISE, MAX_GAP = 0.4, 1e-4
VLLM_STEPS = 60
MAX_FROZEN = 0.15
MAX_WARM_FROZEN = 0.3
"""The same after a warm-up, which makes a share of the replies right."""

PER_ROW = 10
"""The number of steps whose rewards are averaged in a row of the table."""


def install_environment(folder: Path) -> dict[str, str]:
    """Make the environment of the example importable from *folder*, and return variables for processes that use it."""
    metadata = folder / "gym_env_digits-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gym-env-digits\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[gymsdk.environments]\ndigits = gym_env_digits\n")
    (folder / "gym_env_digits.py").symlink_to(EXAMPLE / "environment" / "gym_env_digits.py")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def run(variables: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the training script of the example."""
    command = [sys.executable, str(EXAMPLE / "train.py"), *options]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a training run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compute_mean(curve: list[dict[str, Any]]) -> float:
    """Return the mean reward of *curve*."""
    return sum(float(line["reward"]) for line in curve) / len(curve)


def print_curves(curves: dict[str, list[dict[str, Any]]]) -> None:
    """Print the mean reward of each ten steps, and the largest difference of log-probabilities."""
    print(f"\n{'steps':<10}{''.join(f'{label:<10}' for label in curves)}largest difference of log-probabilities")
    for start in range(0, max(map(len, curves.values())), PER_ROW):
        parts = [curve[start : start + PER_ROW] for curve in curves.values()]
        means = "".join(f"{compute_mean(part):<10.3f}" if part else " " * 10 for part in parts)
        print(f"{start:<10}{means}{max(line['gap'] for part in parts for line in part):.1e}")


def compare(
    variables: dict[str, str], folder: Path, steps: int, max_frozen: float, *options: str, plot: Path | None = None
) -> bool:
    """Train, play without learning and train without weight updates; print the results, return whether all hold."""
    curves = {}
    for label, flags in {"trained": (), "frozen": ("--frozen",)}.items():
        began = time.monotonic()
        curve_file = folder / f"{label}.jsonl"
        done = run(variables, "--steps", str(steps), "--output", str(curve_file), *options, *flags)
        if done.returncode != 0:
            sys.exit(done.stderr)
        curves[label] = read_curve(curve_file)
        print(f"{label}: {steps} steps in {time.monotonic() - began:.0f} s")
    if plot is not None:
        files = [str(folder / f"{label}.jsonl") for label in curves]
        subprocess.run([sys.executable, str(EXAMPLE / "plot.py"), str(plot), *files], check=True)
    without_sync = run(variables, "--steps", "3", "--without-sync", *options)
    print_curves(curves)
    trained, frozen = curves["trained"], compute_mean(curves["frozen"])
    rise = compute_mean(trained[-PER_ROW:]) - compute_mean(trained[:PER_ROW])
    gap = max(line["gap"] for curve in curves.values() for line in curve)
    noticed = without_sync.returncode != 0 and "has other weights" in without_sync.stderr
    print(f"\nreward rises by {rise:.2f} (at least {MIN_RISE}); control {frozen:.3f} (below {max_frozen})")
    print(f"largest difference {gap:.1e} (below {MAX_GAP:.0e})")
    print(f"without weight updates: {without_sync.stderr.strip().splitlines()[-1] if noticed else 'NOT NOTICED'}")
    return rise >= MIN_RISE and frozen < max_frozen and gap < MAX_GAP and noticed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    options = parser.parse_args()
    if find_spec("torch") is None:
        print("skipped: torch is not installed")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "packages").mkdir()
        variables = install_environment(folder / "packages")
        print("The generation server of the example, an environment of two turns")
        succeeded = [compare(variables, folder, options.steps, MAX_FROZEN, plot=options.plot)]
        vllm_python = os.environ.get("GYMSDK_VLLM_PYTHON")
        if vllm_python is None:
            print("\nskipped: vLLM (GYMSDK_VLLM_PYTHON names no interpreter that has it)")
        else:
            for environment in ("digits", "tool_call"):
                print(f"\nvLLM, {environment}, after a supervised warm-up")
                engine = ("--vllm-python", vllm_python, "--environment", environment)
                succeeded.append(compare(variables, folder, VLLM_STEPS, MAX_WARM_FROZEN, *engine))
    if not all(succeeded):
        sys.exit(1)


if __name__ == "__main__":
    main()
