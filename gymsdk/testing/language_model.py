"""A small language model for the test engine: it gives each token a probability, and writes random letters.

A token depends only on the token before it. Scripted policies determine their texts themselves, and the engine reports
the log-probabilities of this model for them. For prompts that a policy does not know, the model writes the text, so
that its tokens have the frequencies that their log-probabilities promise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

LETTERS = tuple(b" abcdeginorst")
"""The tokens that the model writes, beside the token that ends a generation."""

OTHER_SHARE = 0.02
"""The probability of all other tokens together; the model gives them a probability, but never writes them."""


class LetterModel:
    """The probabilities of the next token.

    Args:
        size: The number of ids.
        end: The id that ends a generation.
    """

    def __init__(self, size: int, end: int) -> None:
        self._size = size
        self._tokens = (*LETTERS, end)
        self._end = end
        self._compute = lru_cache(1024)(self._compute_probabilities)

    def compute_logprobs(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of *ids* after *prompt* and the ids before it."""
        before = [*prompt[-1:], *ids] if prompt else [self._end, *ids]
        return [self._compute_logprob(token, previous) for previous, token in zip(before, ids, strict=False)]

    def write(
        self,
        prompt: Sequence[int],
        limit: int,
        *,
        temperature: float,
        allowed: Sequence[int] | None,
        rng: random.Random,
    ) -> list[int]:
        """Return at most *limit* sampled ids after *prompt*, of those *allowed*."""
        ids: list[int] = []
        if allowed:
            return [allowed[0]] * limit
        while len(ids) < limit and ids[-1:] != [self._end]:
            weights = self._compute([*prompt, *ids][-1])
            cooled = [weight ** (1 / max(temperature, 0.01)) for weight in weights]
            ids += rng.choices(self._tokens, cooled)
        return ids

    def _compute_logprob(self, token: int, previous: int) -> float:
        if token in self._tokens:
            return math.log(self._compute(previous)[self._tokens.index(token)])
        return math.log(OTHER_SHARE / (self._size - len(self._tokens)))

    def _compute_probabilities(self, previous: int) -> list[float]:
        weights = [1 + (31 * token + 17 * previous) % 97 for token in self._tokens]
        return [weight / sum(weights) for weight in weights]
