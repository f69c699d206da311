"""How a small model learns in an environment: the settings of the two tasks that it can learn, and of any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """An environment, and how a small model starts to learn in it.

    Attributes:
        environment: The name of the environment.
        settings: The settings of the environment.
        max_reply_tokens: The largest number of tokens of a reply; `None` for that of the environment's own solution
            and a quarter more.
        learning_rate: The learning rate of GRPO.
        entropy_bonus: How strongly GRPO keeps the policy from settling on one reply before it has seen better ones.
        warm_up_steps: The steps of supervised training before GRPO, for a model of transformers.
        warm_up_right: The share of right replies in that training.
        shows_instructions: Whether the model reads system messages. They are long, and the same for all tasks of
            many environments.
    """

    environment: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_reply_tokens: int | None = None
    learning_rate: float = 1e-3
    entropy_bonus: float = 0.0
    warm_up_steps: int = 300
    warm_up_right: float = 0.5
    shows_instructions: bool = True


EXERCISES = {
    "digits": Exercise(
        environment="digits",
        max_reply_tokens=4,
        learning_rate=3e-3,
        entropy_bonus=0.05,
        warm_up_steps=200,
        warm_up_right=0.2,
    ),
    # The distance between two cities is one call away, and the reply must repeat it.
    "tool_call": Exercise(
        environment="tool_call",
        settings={"kinds": "distance", "calls": "1,1"},
        max_reply_tokens=32,
        learning_rate=1e-3,
        entropy_bonus=0.0,
        warm_up_steps=400,
        warm_up_right=0.5,
        shows_instructions=False,
    ),
}


def build_exercise(environment: str, settings: Mapping[str, Any]) -> Exercise:
    """Return the exercise of any environment; *settings* are added to those of an exercise that is listed above."""
    exercise = EXERCISES.get(environment) or Exercise(environment=environment)
    return replace(exercise, settings={**exercise.settings, **settings})
