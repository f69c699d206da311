from __future__ import annotations

from gymsdk.checks.isolation import (
    MAX_EXAMPLES,
    _check_interleaved,
    _Comparison,
    _DifferenceError,
    _find_smallest_difference,
)
from gymsdk.checks.phases import build_scripts

from .healthy import HEALTHY

LATE = (
    HEALTHY.replace(
        "async def reset():\n    return",
        "async def reset(task: Order):\n    LAST[:] = [task.book]\n    return",
    )
    .replace("state.books == [task.book]", "state.books == LAST")
    .replace("class Shelf", "LAST = []\n\n\nclass Shelf")
)
"""The shelf with a verifier that compares with the task that was opened last."""


async def test_module_state_is_found_with_the_steps_that_show_it(subject, outcome):
    result = await outcome("runtime.episode_isolation", subject(LATE))
    assert result.status == "failed"
    assert "reward was 1.0, then 0.0" in result.findings[0].problem


async def test_no_episode_starts_after_the_deadline(subject):
    shelf = subject(HEALTHY)
    async with shelf.enter_environment() as environment:
        played = await build_scripts(shelf, environment, tasks=1)
        no_records = [{} for _ in played]
        assert await _check_interleaved(_Comparison(environment, played, no_records, deadline=0.0), MAX_EXAMPLES) == []


def test_an_interleaving_is_reduced_to_the_smallest_failing_one():
    def run(picks):
        if picks.count(1) > 1 and 2 in picks:
            raise _DifferenceError(str(picks))

    assert sorted(_find_smallest_difference(run, 3, MAX_EXAMPLES)) == sorted(str([0, 1, 1, 2]))


def test_a_difference_that_occurs_once_is_found():
    failures = iter([True])

    def run(picks):
        if next(failures, False):
            raise _DifferenceError("once")

    assert _find_smallest_difference(run, 3, MAX_EXAMPLES) == "once"


def test_without_a_difference_nothing_is_found_and_no_files_are_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _find_smallest_difference(lambda _: None, 3, MAX_EXAMPLES) is None
    assert list(tmp_path.iterdir()) == []
