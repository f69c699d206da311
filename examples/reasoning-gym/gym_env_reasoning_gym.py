"""The generators of the package `reasoning-gym` as one environment. The setting *dataset* selects a generator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from random import Random
from typing import Any, Literal, TypeAlias

from gymsdk import Claims, Config, Message, Task, Transcript, UsageError, Verdict, hookimpl

Split: TypeAlias = Literal["train", "validation"]

SIZES = {"train": 10_000, "validation": 100}
WRONG_ANSWER_SCORE = 0.05
"""The score that some generators give for a wrong answer that is not empty."""

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Chosen(Config):
    """The settings: *dataset* is the name of a generator, such as `chain_sum`."""

    dataset: str = "chain_sum"


class Puzzle(Task):
    """A puzzle, identified by generator, seed and index. `verify` generates the puzzle again."""

    dataset: str
    seed: int
    size: int
    index: int


@hookimpl
def tasks(split: Split, seed: int, config: Chosen) -> Iterator[Puzzle]:
    """Generate the puzzles of the selected generator."""
    place = {"dataset": config.dataset, "seed": Random(f"{split}:{seed}").randrange(2**31), "size": SIZES[split]}
    drawn = _dataset(**place)
    for index in range(SIZES[split]):
        asked = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": drawn[index]["question"]}]
        yield Puzzle.model_validate({"responses_create_params": {"input": asked}, **place, "index": index})


@hookimpl
def verify(task: Puzzle, transcript: Transcript) -> Verdict:
    """Score the last answer in tags, or the whole reply if it has no tags, with the generator's own function."""
    answers = _TAGGED.findall(transcript.reply) or [transcript.reply]
    drawn, entry = _entry(task)
    return Verdict(reward=float(drawn.score_answer(answers[-1].strip(), entry)))


@hookimpl
def solve(task: Puzzle) -> Message | None:
    """Reply with the generator's answer, or return `None` if it has no answer."""
    answer = _entry(task)[1]["answer"]
    return None if answer is None else Message(content=f"<answer>{answer}</answer>")


@hookimpl
def claims() -> Claims:
    """Claim a reward of 1.0 for the answer, and `WRONG_ANSWER_SCORE` for a guess."""
    return Claims(chance=WRONG_ANSWER_SCORE)


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
