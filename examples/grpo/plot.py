"""Draw the reward curves of training runs.

usage: python plot.py OUTPUT.svg CURVE.jsonl...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def main() -> None:
    output, *curves = sys.argv[1:]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for curve in map(Path, curves):
        lines = [json.loads(line) for line in curve.read_text().splitlines()]
        axes.plot([line["step"] for line in lines], [line["reward"] for line in lines], label=curve.stem)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO, an environment of two turns")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    main()
