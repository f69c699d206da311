"""A new interpreter draws the rows of an installed environment."""

from __future__ import annotations

import pytest

from gymsdk.checks import determinism
from gymsdk.checks.report import NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.errors import BrokenEnvironment

HASHED = """
print("hello")

@hookimpl
def tasks(split: Literal["train"], seed: int):
    for number in range(9):
        yield Task.ask(f"{seed} {number}", mark=MARK)

@hookimpl
def verify():
    return Verdict(reward=0.0)
"""


@pytest.mark.slow
async def test_the_rows_and_openings_are_those_of_the_split_the_seed_and_the_hash_seed(subject):
    hashed = subject(HASHED.replace("MARK", "hash('mark')"))
    one, other = [
        await determinism.draw_in_new_interpreter(hashed, "train", seed=7, count=2, opened=1, hash_seed=seed)
        for seed in (1, 2)
    ]
    assert [row["responses_create_params"]["input"][0]["content"] for row in one.rows] == ["7 0", "7 1"]
    assert one.openings == [[{"role": "user", "content": "7 0"}]]
    assert one.rows != other.rows


@pytest.mark.slow
async def test_an_error_in_the_new_interpreter_is_reported_and_an_uninstalled_environment_is_skipped(subject):
    hashed = subject(HASHED.replace("MARK", "1 / 0"))
    with pytest.raises(BrokenEnvironment, match=r"a new process .*ZeroDivisionError"):
        await determinism.draw_in_new_interpreter(hashed, "train", seed=0, count=1)
    with pytest.raises(NotApplicable, match="not installed"):
        await determinism.draw_in_new_interpreter(Subject(hashed.name, hashed.make), "train", seed=0, count=1)
