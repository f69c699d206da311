"""Training samples: the tokens of one episode, in the form that TRL's trainers take."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gymsdk.errors import GymsdkError
from gymsdk.responses import is_on_policy
from gymsdk.types import Item, Rollout

log = logging.getLogger("gymsdk")


@dataclass(slots=True)
class Sample:
    """The tokens of one episode.

    Attributes:
        prompt_ids: The tokens before the policy's first turn.
        completion_ids: All later tokens: those of the policy, and those of the environment between its turns.
        env_mask: For each token of the completion, 1 if the policy generated it, otherwise 0.
        logprobs: For each token of the completion, the log-probability with which the policy generated it, and 0 for
            tokens of the environment; `None` if the engine does not return log-probabilities.
        reward: The reward, `None` if the episode could not be scored.
        failure: Why the episode could not be scored or trained on, empty otherwise.
        components: The parts of the reward.
        turns: The number of the policy's turns.
        is_cut: Whether the last of them ended at the token limit.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    reward: float | None = None
    failure: str = ""
    components: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    is_cut: bool = False

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [*self.prompt_ids, *self.completion_ids]

    @property
    def length(self) -> int:
        """The number of all tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def add_environment_tokens(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not generate."""
        self._add(ids, 0, [0.0] * len(ids))

    def add_policy_tokens(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Append the tokens of a turn of the policy."""
        self._add(ids, 1, logprobs)
        self.turns += 1

    def drop_environment_tail(self) -> None:
        """Remove the tokens after the policy's last turn, from which it learns nothing."""
        while self.env_mask and not self.env_mask[-1]:
            self.env_mask.pop()
            self.completion_ids.pop()
            if self.logprobs is not None:
                self.logprobs.pop()

    def score(self, rollout: Rollout) -> None:
        """Set the reward of *rollout*, or the reason why it has none."""
        self.failure = describe_failure(rollout)
        if not self.failure:
            self.reward = rollout.reward
            self.components = dict(rollout.components)

    def _add(self, ids: Sequence[int], mask: int, logprobs: Sequence[float] | None) -> None:
        self.completion_ids += ids
        self.env_mask += [mask] * len(ids)
        if logprobs is None:
            # A turn without log-probabilities leaves the whole episode without: a trainer needs one per token.
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += logprobs


def build_sample(output: Sequence[Item]) -> Sample:
    """Join the tokens of a rollout's turns. Turns that were decoded under a constraint count as the environment's.

    Args:
        output: The output items; the last item of each turn has `prompt_token_ids`, `generation_token_ids` and
            `generation_log_probs`.

    Raises:
        ValueError: No item has tokens of the policy, or a prompt does not continue the tokens before it.
    """
    sample: Sample | None = None
    for item in output:
        tokens: list[int] = item.get("generation_token_ids") or []
        if not tokens:
            continue
        prompt: list[int] = item["prompt_token_ids"]
        if sample is None:
            sample = Sample(prompt)
        before: list[Any] = sample.ids
        if prompt[: len(before)] != before:
            raise ValueError("the conversation was rewritten: a prompt does not continue the tokens before it")
        sample.add_environment_tokens(prompt[len(before) :])
        if is_on_policy(item):
            sample.add_policy_tokens(tokens, item["generation_log_probs"])
        else:
            sample.add_environment_tokens(tokens)
    if sample is None:
        raise ValueError("the rollout has no token IDs; serve the policy with --token-ids")
    if not any(sample.env_mask):
        raise ValueError("each turn was decoded under a constraint, so no token is the policy's own choice")
    return sample


def describe_failure(rollout: Rollout) -> str:
    """Return why *rollout* has no reward, an empty string if it has one."""
    if rollout.verdict is not None:
        return ""
    failure = rollout.failure
    return f"{failure.kind}: {failure.message}" if failure is not None else "the episode has no verdict"


def report_failures(failures: Sequence[str]) -> None:
    """Log how many episodes of a batch failed.

    Args:
        failures: For each episode, why it failed, or an empty string.

    Raises:
        GymsdkError: All episodes failed, so that there is nothing to learn.
    """
    reasons = Counter(filter(None, failures))
    if not reasons:
        return
    (reason, _), count = reasons.most_common(1)[0], reasons.total()
    if count == len(failures):
        raise GymsdkError(f"all {count} episodes failed; most often: {reason}")
    log.warning("%d of %d episodes failed and are masked; most often: %s", count, len(failures), reason)
