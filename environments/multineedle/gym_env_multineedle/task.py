"""A task: a haystack, a question about one of its terms, and the values of that term's synonyms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from random import Random
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from gymsdk import Config, Task

from .haystack import haystack
from .prompts import instructions, question
from .words import entries, value

Split: TypeAlias = Literal["train", "validation", "example"]
"""`train` is endless; `SIZES` holds the number of tasks of the other splits."""

SIZES = {"validation": 200, "example": 5}


class SynonymConfig(Config):
    """The settings: the size of a generated haystack and the number of synonyms to extract."""

    distractors: int = Field(default=300, ge=10, le=50_000, description="lines about other terms")
    needles: int = Field(default=3, ge=1, le=40, description="synonyms to extract, give or take the spread")
    spread: int = Field(default=1, ge=0, description="by how much the number of synonyms varies from task to task")

    @model_validator(mode="after")
    def _needs_a_needle(self) -> Self:
        if self.spread >= self.needles:
            raise ValueError(f"`spread` must be smaller than `needles`, which is {self.needles}")
        return self

    @property
    def sizes(self) -> range:
        """The possible numbers of synonyms of a term in the list."""
        return range(self.needles - self.spread, self.needles + self.spread + 1)


class SynonymTask(Task):
    """A row of the environment.

    It holds the synonyms to extract with their values, in the order of the list, and the term itself
    (the minefield label), which the policy must not extract.
    """

    id: int | None = None
    expected_synonyms: list[str] = Field(min_length=1)
    expected_synonym_values: list[int] = Field(min_length=1)
    minefield_label: str
    minefield_label_value: int


def generated(split: Split, seed: int, config: SynonymConfig) -> Iterator[SynonymTask]:
    """Generate the tasks of a split.

    Args:
        split: The split to generate.
        seed: The same split, seed and settings generate the same tasks.
        config: The settings of the environment.

    Returns:
        An iterator over the tasks. It is endless for `train`.
    """
    numbers: Iterable[int] = range(SIZES[split]) if split in SIZES else count()
    return (_task(number, Random(f"{split}:{seed}:{number}"), config) for number in numbers)


def _task(number: int, rng: Random, config: SynonymConfig) -> SynonymTask:
    entry = rng.choice(entries())
    built = haystack(rng, entry, distractors=config.distractors, sizes=config.sizes)
    messages = [
        {"role": "system", "content": instructions(built.lines)},
        {"role": "user", "content": question(rng, entry)},
    ]
    return SynonymTask(
        responses_create_params={"input": messages, "parallel_tool_calls": False},
        id=number,
        expected_synonyms=built.needles,
        expected_synonym_values=[value(needle) for needle in built.needles],
        minefield_label=entry.term,
        minefield_label_value=value(entry.term),
    )
