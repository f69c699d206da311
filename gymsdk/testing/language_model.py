"""A small language model for the test engine: it gives each token a log-probability, and writes random symbols.

Scripted policies determine their texts themselves, and the engine reports a made-up number for each of their tokens.
For prompts that a policy does not know, the model samples symbols, which have the frequencies that their
log-probabilities promise. Both depend only on the token before, so that the engine gives the same ids the same values
everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

SYMBOLS = tuple(b"!#$%&*+/=?@^~")
"""The tokens that the model writes, beside the one that ends a generation. The texts of policies have few of them."""


class SymbolModel:
    """The log-probabilities of the next token.

    Args:
        end: The id that ends a generation, never at once.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._compute = lru_cache(1024)(self._compute_probabilities)

    def compute_logprobs(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of *ids* after *prompt* and the ids before it."""
        before = [*(prompt[-1:] or [self._end]), *ids]
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
            probabilities = self._compute([*prompt, *ids][-1])
            # A temperature of 0 means the most probable token; the exponent must stay finite.
            weights = [value ** (1 / max(temperature, 0.01)) for value in probabilities.values()]
            ids += rng.choices([*probabilities], weights)
        return ids

    def _compute_logprob(self, token: int, previous: int) -> float:
        if (probability := self._compute(previous).get(token)) is not None:
            return math.log(probability)
        return -(1 + (31 * token + 17 * previous) % 97) / 50

    def _compute_probabilities(self, previous: int) -> dict[int, float]:
        tokens = (*SYMBOLS, self._end) if previous in SYMBOLS else SYMBOLS
        weights = {token: 1 + (31 * token + 17 * previous) % 97 for token in tokens}
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}
