"""Train a small model with TRL on an environment of two turns; on two CPU cores, 150 steps take about 50 seconds.

The environment is the one of `examples/grpo/`: the policy repeats a digit, and in a second turn another one.

usage: python train.py [--steps 150] [--seed 0] [--device cpu] [--output curve.jsonl] [--frozen]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tiny_model import build_model, build_tokenizer
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from gymsdk.trl import rollout_func


def train(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Return the log of each step."""
    rollouts = rollout_func("digits", limit=1000, seed=options.seed)
    trainer = GRPOTrainer(
        model=build_model(options.seed),
        processing_class=build_tokenizer(),
        train_dataset=rollouts.dataset,
        rollout_func=rollouts,
        reward_funcs=rollouts.reward,
        args=GRPOConfig(
            output_dir=str(folder),
            max_steps=options.steps,
            seed=options.seed,
            per_device_train_batch_size=128,
            num_generations=16,
            max_completion_length=2,
            learning_rate=0.0 if options.frozen else 3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            use_cpu=options.device == "cpu",
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="this model is fast enough on the CPU")
    parser.add_argument("--output", type=Path, help="write one JSON line for each step to this file")
    parser.add_argument("--frozen", action="store_true", help="the control: play without learning")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        curve = [
            {"step": number, "reward": entry["reward"]}
            for number, entry in enumerate(train(options, Path(folder)), start=1)
        ]
    if options.output:
        options.output.write_text("".join(f"{json.dumps(line)}\n" for line in curve))
    for name, lines in (("first", curve[:10]), ("last", curve[-10:])):
        print(f"mean reward of the {name} {len(lines)} steps: {sum(line['reward'] for line in lines) / len(lines):.3f}")
    print(f"{len(curve)} steps in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
