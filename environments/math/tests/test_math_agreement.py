from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
from math_corpus import mixed_pairs, pairs
from math_direct import direct_all, grade_all


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_grade_of_the_library_equals_that_of_math_verify_in_nemo_gym(library: ProcessPoolExecutor):
    corpus = pairs() + mixed_pairs(1000)
    assert len(corpus) >= 1500
    expected = library.submit(direct_all, corpus).result()
    graded = library.submit(grade_all, corpus).result()
    # If math-verify cannot read the expected answer, it raises. NeMo Gym counts this as (0.0, None).
    found = [(0.0, None) if grade is None else tuple(grade) for grade in graded]
    assert [(pair, *both) for pair, *both in zip(corpus, expected, found, strict=True) if both[0] != both[1]] == []
    rewards = [reward for reward, _ in expected]
    assert min(rewards.count(1.0), rewards.count(0.0)) >= 300
