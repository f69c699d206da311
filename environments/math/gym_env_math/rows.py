"""The tasks of the environment, and the settings that choose the problems to draw."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gymsdk import Config, Model, Task

from . import library
from .problems import EASIEST, FAMILIES, HARDEST, DrawnProblem, Family

Level = Annotated[int, Field(ge=EASIEST, le=HARDEST)]


def _split_names(families: object) -> object:
    return [name.strip() for name in families.split(",")] if isinstance(families, str) else families


class MathConfig(Config):
    """Which problems to draw, and how to grade answers.

    Attributes:
        families: The problem families to draw from, as a list or as names separated by commas.
        min_difficulty: The lowest difficulty to draw.
        max_difficulty: The highest difficulty to draw.
        grader: Which grader compares the answers: gymsdk's, or math-verify, which is the extra `gym-env-math[sympy]`.
        undecided: What becomes of answers that gymsdk's grader can read but not compare, if there is neither a judge
            nor math-verify: `unscorable`, or `zero` as the reward.
        shortcut: Without effect since version 0.2.
        gold_cache: Without effect since version 0.2.
        judge: A model that compares the answers when the grader finds them different or cannot compare them.
        judge_options: Additional parameters of the requests to the judge.
    """

    families: Annotated[tuple[Family, ...], BeforeValidator(_split_names), Field(min_length=1)] = FAMILIES
    min_difficulty: Level = EASIEST
    max_difficulty: Level = HARDEST
    grader: Literal["gymsdk", "math-verify"] = "gymsdk"
    undecided: Literal["unscorable", "zero"] = "unscorable"
    shortcut: bool | None = None
    gold_cache: bool | None = None
    judge: Model | None = None
    judge_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(f"min_difficulty {self.min_difficulty} is above max_difficulty {self.max_difficulty}")
        return self

    @model_validator(mode="after")
    def _check_grader(self) -> Self:
        if self.grader == library.GRADER and not library.is_installed():
            # The host replaces the values of settings in messages, so the name of the grader would not be readable.
            raise ValueError(
                "the setting `grader` asks for an extra that is not installed: pip install 'gym-env-math[sympy]',"
                " or choose grader=gymsdk"
            )
        for name in ("shortcut", "gold_cache"):
            if getattr(self, name) is not None:
                warnings.warn(
                    f"the setting {name} of math has no effect any more; leave it out", FutureWarning, stacklevel=2
                )
        return self

    @property
    def difficulties(self) -> range:
        """The difficulties to draw from."""
        return range(self.min_difficulty, self.max_difficulty + 1)


INSTRUCTION = "Reason as long as you need, then end with the answer, and nothing else, in the form \\boxed{answer}."


class MathTask(Task):
    """A problem and its expected answer. *other_answers* are other correct ways to write this answer."""

    question: str = ""
    expected_answer: str
    family: str | None = None
    difficulty: int | None = None
    other_answers: tuple[str, ...] = ()


def build_task(drawn: DrawnProblem) -> MathTask:
    """Build a task from a drawn problem."""
    # The last box of the prompt holds a word, so a policy that repeats the prompt earns nothing.
    return MathTask.ask(
        f"{drawn.problem.question}\n\n{INSTRUCTION}",
        question=drawn.problem.question,
        expected_answer=drawn.problem.answer,
        family=drawn.family,
        difficulty=drawn.difficulty,
        other_answers=drawn.problem.variants,
    )


def get_question(task: MathTask) -> str:
    """Return the question, or the whole prompt if the row has no `question` field."""
    return task.question or "\n".join(str(item.get("content", "")) for item in task.input)
