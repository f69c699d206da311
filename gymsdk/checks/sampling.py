"""Test whether tokens were sampled from the probabilities that an engine reports for them.

The test is a sequential likelihood ratio. It predicts each sampled token twice, from the samples before it: by the
reported probabilities, and by alternatives that learn from the observed frequencies or that undo a scaling or a shift
of the log-probabilities. If the engine tells the truth, the expected ratio of the two predictions is at most 1, so by
Markov's inequality the ratio exceeds 10^7 in at most one of 10^7 checks, for any model and any number of samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Sample: TypeAlias = Sequence[tuple[int, float]]
"""The ids and the reported log-probabilities of one generation; all samples follow the same prompt."""

MAX_EVIDENCE = 7 * math.log(10)
"""The largest logarithm of the ratio that a truthful engine may reach: one false alarm in 10^7 checks."""

CONCENTRATIONS = (1.0, 8.0, 64.0, 512.0)
"""The weights that the alternatives that learn give to tokens not seen before, in samples."""

TRANSFORMS = tuple((scale, shift) for scale in (0.5, 1.0, 2.0) for shift in (-2.0, -0.5, 0.0, 0.5, 2.0))
"""The alternatives that undo a change of the log-probabilities: factors and summands. One of them changes nothing."""

SMALLEST = 1e-9
"""The smallest probability of a prediction, so that an event that was predicted to be impossible has a logarithm."""

ROUNDING = 1e-6
"""How much a sum of probabilities may exceed 1, because engines return them with few digits."""


class _Context:
    """The result of earlier samples after one prefix: the counts, the reported values, and the alternatives' sums."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._counts: Counter[int] = Counter()
        self._reported: dict[int, float] = {}
        self._least_sum = 0.0
        self._sums = [0.0] * len(TRANSFORMS)

    def predict(self, token: int) -> float:
        """Return the largest probability of *token* that agrees with the reported values."""
        if token in self._reported:
            return max(_exp(self._reported[token] + self._limit), SMALLEST)
        return max(1 - self._least_sum, SMALLEST)

    def predict_by_alternatives(self, token: int) -> Iterator[float]:
        """Yield the probability of *token* by each alternative."""
        seen = self._counts.total()
        for concentration in CONCENTRATIONS:
            yield (self._counts[token] or concentration) / (seen + concentration)
        for (scale, shift), total in zip(TRANSFORMS, self._sums, strict=True):
            if token in self._reported:
                # Probabilities with a sum above 1 are no distribution until they are normalized.
                yield _exp(self._reported[token] * scale + shift) / max(total, 1.0)
            else:
                yield max(1 - total, 0.0)

    def add(self, token: int, logprob: float) -> bool:
        """Add a sample. Return whether the reported values can be those of a distribution: their sum is at most 1."""
        self._counts[token] += 1
        if token not in self._reported:
            self._reported[token] = logprob
            self._least_sum += _exp(logprob - self._limit)
            for number, (scale, shift) in enumerate(TRANSFORMS):
                self._sums[number] += _exp(logprob * scale + shift)
        return self._least_sum <= 1 + ROUNDING


def _exp(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))


def measure_evidence(samples: Iterable[Sample], limit: float) -> tuple[float, float]:
    """Return the evidence against the reported values of the first tokens and of the later tokens of *samples*.

    Args:
        samples: Samples after one prompt, in the order in which they were drawn.
        limit: How much a reported value may differ from the true one because of the engine's precision.

    Returns:
        Two natural logarithms of likelihood ratios. Values above `MAX_EVIDENCE` disprove the reported values.
    """
    contexts: dict[tuple[int, ...], _Context] = {}
    totals = [[0.0] * (len(CONCENTRATIONS) + len(TRANSFORMS)) for _ in range(2)]
    for sample in samples:
        prefix: tuple[int, ...] = ()
        for token, logprob in sample:
            context = contexts.setdefault(prefix, _Context(limit))
            sums = totals[bool(prefix)]
            expected = math.log(context.predict(token))
            for number, predicted in enumerate(context.predict_by_alternatives(token)):
                sums[number] += math.log(max(predicted, SMALLEST)) - expected
            if not context.add(token, logprob):
                sums[0] = math.inf
            prefix = (*prefix, token)
    first, later = map(_compute_log_mean, totals)
    return first, later


def find_undetected(samples: Sequence[Sample], limit: float) -> tuple[list[str], list[str]]:
    """Return the wrong log-probabilities that *samples* of a truthful engine could not disprove.

    The same test runs on the samples with changed log-probabilities. It does not find the change if the policy is too
    certain of its tokens, or if nearly all of its tokens differ.

    Returns:
        The names of the changes that would go unnoticed at the first token, and at the later tokens.
    """
    unnoticed: tuple[list[str], list[str]] = ([], [])
    for name, scale, shift in (("halved", 0.5, 0.0), ("doubled", 2.0, 0.0), ("2 lower", 1.0, -2.0)):
        changed = [[(token, logprob * scale + shift) for token, logprob in sample] for sample in samples]
        for names, evidence in zip(unnoticed, measure_evidence(changed, limit), strict=True):
            if evidence <= MAX_EVIDENCE:
                names.append(name)
    return unnoticed


def _compute_log_mean(values: Sequence[float]) -> float:
    largest = max(values)
    if largest == math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values) / len(values))
