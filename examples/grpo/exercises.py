"""The two tasks that the policy can learn: repeat digits, or call a tool and report its result."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """An environment, and how a small model starts to learn in it.

    Attributes:
        environment: The name of the environment.
        settings: The settings of its tasks, as `gymsdk rollout --set` takes them.
        max_reply_tokens: The largest number of tokens of a reply.
        learning_rate: The learning rate of GRPO.
        entropy_bonus: How strongly GRPO keeps the policy from settling on one reply before it has seen better ones.
        warm_up_steps: The steps of supervised training before GRPO, for a model on vLLM.
        warm_up_right: The share of right replies in that training.
    """

    environment: str
    settings: dict[str, str] = field(default_factory=dict)
    max_reply_tokens: int
    learning_rate: float
    entropy_bonus: float
    warm_up_steps: int
    warm_up_right: float


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
    ),
}
