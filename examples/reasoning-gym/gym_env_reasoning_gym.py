"""The generators of the package `reasoning-gym` as one environment: the setting *dataset* chooses one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Any, Literal, TypeAlias

from gymsdk import Claims, Config, Message, Task, Transcript, UsageError, Verdict, hookimpl

Split: TypeAlias = Literal["train", "validation"]

SIZES = {"train": 10_000, "validation": 100}
CRUMB = 0.05
"""What some of the generators pay for an answer that is wrong but there."""

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Chosen(Config):
    """Which generator: a name such as `chain_sum`."""

    dataset: str = "chain_sum"


class Puzzle(Task):
    """One puzzle, by the place it has in its generator: it is drawn again to be graded."""

    dataset: str
    seed: int
    size: int
    index: int


@hookimpl
def tasks(split: Split, seed: int, config: Chosen) -> Iterator[Puzzle]:
    """Draw the puzzles of the chosen generator."""
    place = {"dataset": config.dataset, "seed": Random(f"{split}:{seed}").randrange(2**31), "size": SIZES[split]}
    drawn = _dataset(**place)
    for index in range(SIZES[split]):
        asked = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": drawn[index]["question"]}]
        yield Puzzle.model_validate({"responses_create_params": {"input": asked}, **place, "index": index})


@hookimpl
def verify(task: Puzzle, transcript: Transcript) -> Verdict:
    """Give the generator's own score of the last answer between tags, of the whole reply where there are none."""
    answers = _TAGGED.findall(transcript.reply) or [transcript.reply]
    drawn, entry = _entry(task)
    return Verdict(reward=float(drawn.score_answer(answers[-1].strip(), entry)))


@hookimpl
def solve(task: Puzzle) -> Message | None:
    """Reply with the generator's answer, where it has one."""
    answer = _entry(task)[1]["answer"]
    return None if answer is None else Message(content=f"<answer>{answer}</answer>")


@hookimpl
def claims() -> Claims:
    """Claim full marks for the answer and a crumb for a wrong one."""
    return Claims(chance=CRUMB)


def _entry(task: Puzzle) -> tuple[Any, Any]:
    drawn = _dataset(dataset=task.dataset, seed=task.seed, size=task.size)
    return drawn, _puzzle(task.dataset, task.seed, task.size, task.index)


@lru_cache(maxsize=256)
def _puzzle(dataset: str, seed: int, size: int, index: int) -> Any:
    return _dataset(dataset=dataset, seed=seed, size=size)[index]


@lru_cache(maxsize=8)
def _dataset(*, dataset: str, seed: int, size: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise UsageError(f"reasoning-gym has no dataset {dataset!r}; it has: {', '.join(sorted(DATASETS))}")
    return reasoning_gym.create_dataset(dataset, seed=seed, size=size)
