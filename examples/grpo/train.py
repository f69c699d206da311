"""Train a small policy with GRPO on an environment that gymsdk serves.

The rollouts are played by gymsdk's agent, model server and environment server; the policy's tokens come from
`generation_server.py`, which gets the new weights after each step.

usage: python train.py [--environment NAME [KEY=VALUE ...]] [--steps 80] [--seed 0] [--output curve.jsonl]
                       [--frozen] [--without-sync] [--vllm-python PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deployment import deploy
from engines import OwnEngine, VllmEngine, create_engine
from exercises import EXERCISES, Exercise, build_exercise

from gymsdk import Environment, Task, load
from gymsdk.client import ServerClient
from gymsdk.errors import GymsdkError, UsageError

GROUPS, SAMPLES = 8, 16
"""The number of tasks in a step, and of rollouts of each task."""

CLIP = 0.2
MAX_LOGPROB_GAP = 1e-4
"""The largest difference between the log-probabilities of trainer and generator, if both have the same weights."""


class Sample(NamedTuple):
    """The tokens of one rollout; *logprobs* has 0.0 and *is_policy* 0.0 for the tokens of the environment."""

    ids: list[int]
    is_policy: list[float]
    logprobs: list[float]
    reward: float


async def play(
    client: ServerClient, environment: str, tasks: list[Task], step: int, max_reply_tokens: int
) -> list[Sample]:
    """Play each task SAMPLES times, all at the same time."""

    async def run(number: int, task: Task) -> Sample:
        row = task.row()
        row["responses_create_params"] |= {
            "temperature": 1.0,
            "max_output_tokens": max_reply_tokens,
            "seed": step * 100_000 + number,
        }
        answer = await client.post(f"{environment}_simple_agent", "/run", json=row)
        if not answer.ok:
            raise SystemExit(f"a rollout of {environment} failed with status {answer.status}: {answer.text[:500]}")
        return build_sample(answer.json())

    repeated = [task for task in tasks for _ in range(SAMPLES)]
    return await asyncio.gather(*(run(number, task) for number, task in enumerate(repeated)))


def build_sample(result: dict[str, Any]) -> Sample:
    """Join the turns of a rollout: each prompt continues the tokens of the turn before."""
    ids: list[int] = []
    is_policy: list[float] = []
    logprobs: list[float] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        assert prompt[: len(ids)] == ids, "the prompt does not continue the turn before"
        new = len(prompt) - len(ids)
        ids = [*prompt, *generated]
        # The log-probabilities of a turn that was decoded under a constraint are not those of the policy.
        is_own = 0.0 if item.get("constrained_decoding") else 1.0
        is_policy += [0.0] * new + [is_own] * len(generated)
        logprobs += [0.0] * new + item["generation_log_probs"]
    if not ids:
        raise SystemExit("a task does not fit into the model's context; choose smaller tasks with KEY=VALUE")
    return Sample(ids, is_policy, logprobs, result["reward"])


def pad(rows: list[list[Any]], value: float) -> torch.Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def train_step(
    engine: OwnEngine | VllmEngine, optimizer: torch.optim.Optimizer, samples: list[Sample], entropy_bonus: float
) -> float:
    """Update the policy, and return the largest difference to the log-probabilities of the generation server."""
    ids = pad([sample.ids for sample in samples], engine.pad)
    mask = pad([sample.is_policy for sample in samples], 0.0)[:, 1:]
    sampled = pad([sample.logprobs for sample in samples], 0.0)[:, 1:]
    rewards = torch.tensor([sample.reward for sample in samples]).view(GROUPS, SAMPLES)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    optimizer.zero_grad()
    gap = 0.0
    # One group after another: the distributions of long conversations need much memory.
    for rows in torch.arange(len(samples)).split(SAMPLES):
        distributions = engine.policy(ids[rows, :-1])
        logprobs = distributions.gather(2, ids[rows, 1:, None])[..., 0]
        gap = max(gap, float(((logprobs - sampled[rows]).abs() * mask[rows]).max().detach()))
        ratio = (logprobs - sampled[rows]).exp()
        weights = advantages.view(-1, 1)[rows]
        gain = torch.minimum(ratio * weights, ratio.clamp(1 - CLIP, 1 + CLIP) * weights)
        entropy = -(distributions.exp() * distributions).sum(-1)
        loss = -((gain + entropy_bonus * entropy) * mask[rows]).sum() / mask.sum()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(engine.policy.parameters(), 1.0)
    optimizer.step()
    return gap


def iter_tasks(environment: Environment, split: str, seed: int) -> Iterator[Task]:
    """Yield the tasks of *split* endlessly: those of a finite split again and again."""
    while True:
        tasks = environment.tasks(split, seed=seed)
        first = next(tasks, None)
        if first is None:
            raise SystemExit(f"split {split!r} of {environment.name} has no task")
        yield first
        yield from tasks


def train(
    options: argparse.Namespace, exercise: Exercise, environment: Environment, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield the mean reward, the log-probability gap and the seconds of each step."""
    torch.set_num_threads(1)
    split = "train" if "train" in environment.splits else environment.splits[0]
    engine = create_engine(options.vllm_python, exercise, split, folder, options.seed)
    learning_rate = 0.0 if options.frozen else exercise.learning_rate
    optimizer = torch.optim.AdamW(engine.policy.parameters(), lr=learning_rate, weight_decay=0.0)
    tasks = iter_tasks(environment, split, options.seed)
    with deploy(exercise, engine, folder / "engine.log") as servers, asyncio.Runner() as runner:
        client = ServerClient(servers.head)
        for step in range(options.steps):
            began = time.monotonic()
            chosen = list(islice(tasks, GROUPS))
            samples = runner.run(play(client, exercise.environment, chosen, step, engine.max_reply_tokens))
            gap = train_step(engine, optimizer, samples, exercise.entropy_bonus)
            if gap > MAX_LOGPROB_GAP:
                raise SystemExit(
                    f"step {step}: the log-probabilities of trainer and generation server differ by {gap:.3g}; the"
                    " generation server has other weights"
                )
            if not options.without_sync:
                engine.push_weights(servers.generation_url)
            reward = sum(sample.reward for sample in samples) / len(samples)
            yield {"step": step, "reward": reward, "gap": gap, "seconds": time.monotonic() - began}


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Return the settings in *pairs*, KEY=VALUE each, read as `gymsdk rollout --set` reads them.

    Raises:
        UsageError: A pair has no `=`.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"{pair!r} is no setting of the environment; write it as KEY=VALUE")
        try:
            settings[name] = json.loads(value) if value[:1] in {"[", "{"} or value == "null" else value
        except ValueError as error:
            raise UsageError(f"the value of {pair!r} is not valid JSON: {error}") from None
    return settings


def load_environment(words: list[str]) -> tuple[Exercise, Environment]:
    """Return the exercise and the environment that the words after --environment describe.

    Raises:
        GymsdkError: The environment or a setting is unknown, or the environment has no tasks.
    """
    exercise = build_exercise(words[0], parse_settings(words[1:]))
    environment = load(exercise.environment, **exercise.settings)
    if not environment.splits:
        raise UsageError(f"environment {environment.name!r} has no tasks to train on")
    if exercise != EXERCISES["digits"] and find_spec("transformers") is None:
        raise UsageError(f"the model for {environment.name!r} needs transformers; run `pip install transformers`")
    return exercise, environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write one JSON line for each step to this file")
    parser.add_argument("--frozen", action="store_true", help="the control: play without learning")
    parser.add_argument("--without-sync", action="store_true", help="never send weights: the check must fail")
    parser.add_argument("--vllm-python", metavar="PATH", help="generate with vLLM, which this interpreter has")
    parser.add_argument(
        "--environment",
        nargs="+",
        default=["digits"],
        metavar=("NAME", "KEY=VALUE"),
        help="the environment and its settings; default: digits",
    )
    options = parser.parse_args()
    try:
        exercise, environment = load_environment(options.environment)
    except GymsdkError as error:
        parser.exit(2, f"train.py: error: {error}\n")
    curve = []
    folder = tempfile.TemporaryDirectory()
    for line in train(options, exercise, environment, Path(folder.name)):
        curve.append(line)
        sys.stdout.write(f"step {line['step']:3} reward {line['reward']:.3f} gap {line['gap']:.1e}\n")
        sys.stdout.flush()
        if options.output is not None:
            options.output.write_text("".join(json.dumps(point) + "\n" for point in curve))
    rewards = [line["reward"] for line in curve]
    first, last = sum(rewards[:10]) / len(rewards[:10]), sum(rewards[-10:]) / len(rewards[-10:])
    count = len(rewards[:10])
    sys.stdout.write(f"mean reward of the first {count} steps {first:.3f}, of the last {count} {last:.3f}\n")


if __name__ == "__main__":
    main()
