"""The settings of the environment."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from gymsdk import Config, Model

from .problems import EASIEST, FAMILIES, HARDEST, Family

Level = Annotated[int, Field(ge=EASIEST, le=HARDEST)]


def _listed(families: object) -> object:
    return [name.strip() for name in families.split(",")] if isinstance(families, str) else families


class MathConfig(Config):
    """Which problems to draw, and how to grade answers.

    Attributes:
        families: The problem families to draw from, as a list or as names separated by commas.
        min_difficulty: The lowest difficulty to draw.
        max_difficulty: The highest difficulty to draw.
        shortcut: Whether to grade clear cases without math-verify. The grades stay the same.
        gold_cache: Whether to cache parsed expected answers. The grades stay the same.
        judge: A model that compares the answers when math-verify finds them different.
        judge_options: Additional parameters of the requests to the judge.
    """

    families: Annotated[tuple[Family, ...], BeforeValidator(_listed), Field(min_length=1)] = FAMILIES
    min_difficulty: Level = EASIEST
    max_difficulty: Level = HARDEST
    shortcut: bool = True
    gold_cache: bool = True
    judge: Model | None = None
    judge_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(f"min_difficulty {self.min_difficulty} is above max_difficulty {self.max_difficulty}")
        return self

    @property
    def difficulties(self) -> range:
        """The difficulties to draw from."""
        return range(self.min_difficulty, self.max_difficulty + 1)
