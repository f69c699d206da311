"""Checks of an engine believe one that tells the truth, and find each lie about ids, text and probabilities."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

import gymsdk
from checks.lying_engine import KINDS, LIES, serve_lying_engine
from gymsdk.checks.engine import EngineChecker, check_engine
from gymsdk.checks.results import CheckFailed, CheckResult
from gymsdk.checks.sampling import MAX_EVIDENCE, find_undetected, measure_evidence
from gymsdk.http import client
from gymsdk.responses import TokenInterface
from gymsdk.testing.templates import TemplateTokenizer

CELLS = [(interface, lie) for interface in KINDS for lie in LIES]
FAST = {("nemo-rl", "halved"), ("vllm-completions", "2 lower, scores too"), ("sglang", "text of other ids")}


async def check(interface: str, lie: str = "", *, pairs: bool = False) -> list[CheckResult]:
    tokenizer = TemplateTokenizer() if interface == "sglang" else None
    async with serve_lying_engine(interface, lie, pairs=pairs) as url:
        model = gymsdk.model(f"vllm/policy@{url}", tokens=True, token_interface=interface, tokenizer=tokenizer)
        try:
            return await check_engine(model, tokenizer)
        finally:
            await client.aclose()


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("interface", KINDS)
async def test_a_truthful_engine_fails_no_check(interface: TokenInterface, pairs: bool) -> None:
    if interface == "sglang" and pairs:
        pytest.skip("the tokenizer of the client has no pairs")
    results = await check(interface, pairs=pairs)
    skipped = {result.detail for result in results if result.outcome == "skipped"}
    assert [result for result in results if result.outcome == "failed"] == []
    assert all(detail.startswith("not checked: ") for detail in skipped)
    assert any("limit 1.0e-04 = 8 x the engine's own spread" in result.detail for result in results)
    if interface == "nemo-rl":
        assert "not checked: this engine gives no prompt log-probabilities" in skipped


@pytest.mark.parametrize(
    ("interface", "lie"), [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS]
)
async def test_a_lying_engine_fails_a_check(interface: TokenInterface, lie: str) -> None:
    results = await check(interface, lie)
    assert [result for result in results if result.outcome == "failed"], results


async def test_ids_of_another_tokenizer_are_found_with_that_of_the_trainer() -> None:
    """The engine's own tokenizer agrees with its ids; only the trainer knows which ids its model has."""
    async with serve_lying_engine("vllm-completions", pairs=True) as url:
        model = gymsdk.model(f"vllm/policy@{url}", tokens=True, token_interface="vllm-completions")
        checker = EngineChecker(model, TemplateTokenizer(pairs=False))
        with pytest.raises(CheckFailed, match="which the given tokenizer does not have"):
            await checker.check_texts()
        await client.aclose()


@cache
def build_weights(size: int, spread: float, previous: int) -> list[float]:
    return [math.exp(spread * random.Random(f"{previous} {token}").gauss(0, 1)) for token in range(size)]


def build_samples(size: int, spread: float, count: int = 384, seed: int = 0) -> list[list[tuple[int, float]]]:
    """Return samples of two tokens; the probabilities depend on the token before."""
    rng = random.Random(seed)

    def draw(previous: int) -> tuple[int, float]:
        weights = build_weights(size, spread, previous)
        token = rng.choices(range(size), weights)[0]
        return token, math.log(weights[token] / sum(weights))

    samples = []
    for _ in range(count):
        first = draw(-1)
        samples.append([first, draw(first[0])])
    return samples


@pytest.mark.parametrize(("size", "spread"), [(2, 0.3), (13, 0.7), pytest.param(100, 1.5, marks=pytest.mark.slow)])
def test_true_probabilities_are_never_disproved(size: int, spread: float) -> None:
    for seed in range(10):
        assert max(measure_evidence(build_samples(size, spread, 200, seed), 1e-4)) < 1


@pytest.mark.parametrize("size", [2, 13, 100])
def test_what_the_samples_cannot_show_is_named(size: int) -> None:
    samples = build_samples(size, 0.7)
    assert find_undetected(samples, 1e-4) == ([], [])
    certain = [[(0, 0.0), (0, 0.0)]] * 384
    assert find_undetected(certain, 1e-4)[0] == ["halved", "doubled"]
    different = [[(number, -9.0)] for number in range(384)]
    assert "2 lower" in find_undetected(different, 1e-4)[0]


def test_evidence_distinguishes_the_first_token_from_later_ones() -> None:
    samples = [[first, (token, logprob - 2)] for first, (token, logprob) in build_samples(13, 0.7)]
    first, later = measure_evidence(samples, 1e-4)
    assert first < 1
    assert later > MAX_EVIDENCE
