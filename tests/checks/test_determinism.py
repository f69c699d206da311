from __future__ import annotations

import pytest

from .healthy import HEALTHY

SEED = "runtime.seed_control"


@pytest.mark.slow
async def test_a_healthy_environment_passes(subject, outcome):
    assert (await outcome(SEED, subject(HEALTHY))).status == "passed"


async def test_a_split_that_depends_on_earlier_seeds_is_found(subject, outcome):
    source = HEALTHY.replace('f"{split}:{seed}"', "f'{split}:{SEEN.add(seed) or len(SEEN)}'")
    result = await outcome(SEED, subject(source.replace("class Shelf", "SEEN = set()\n\n\nclass Shelf")))
    assert "with seed 0, drawn" in result.findings[0].problem


@pytest.mark.slow
async def test_a_verdict_that_depends_on_the_clock_is_found(subject, outcome):
    source = HEALTHY.replace("reward=float(", "reward=time.perf_counter() * float(").replace(
        "import random", "import random, time"
    )
    result = await outcome(SEED, subject(source))
    assert "verify.verdict.reward was" in result.findings[0].problem


@pytest.mark.slow
async def test_a_random_state_at_every_reset_is_found(subject, outcome):
    source = HEALTHY.replace("state=Shelf()", "state=Shelf(books=[str(random.random())])")
    result = await outcome(SEED, subject(source))
    assert "reset.state.books.0 was" in result.findings[0].problem


@pytest.mark.slow
async def test_kinds_that_alternate_from_a_fixed_start_are_found(subject, outcome):
    source = (
        HEALTHY.replace("book: str\n\n\nclass Shelf", "book: str\n    kind: int = 0\n\n\nclass Shelf")
        .replace("    while title :=", "    kind = -1\n    while title :=")
        .replace("        yield Order.ask(", "        kind = (kind + 1) % 3\n        yield Order.ask(")
        .replace("book=title[::-1])", "book=title[::-1], kind=kind)")
    )
    result = await outcome(SEED, subject(source))
    assert result.findings[0].problem == "split 'train': 'kind' is 0 in the first task of every seed"
    result = await outcome(SEED, subject(source.replace("kind = -1", "kind = rng.randrange(3)")))
    assert result.status == "passed"
