"""The `metrics` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import pytest

from gymsdk import Environment, Failed, Rollout, hookimpl

from .environments import Judge


class GivenMetrics(Judge):
    """An environment with given metrics."""

    def __init__(self, *answers) -> None:
        self.answers = answers

    @hookimpl
    def metrics(self, rollouts):
        return self.answers[0]

    @hookimpl(specname="metrics")
    async def more(self, rollouts):
        return self.answers[-1]


async def test_metrics_receives_the_rollouts_and_those_of_several_hooks_are_merged():
    class Counts(Judge):
        @hookimpl
        def metrics(self, rollouts):
            return {"total": sum(rollout.reward for rollout in rollouts)}

    rollout = Rollout(id="1", environment="counts", row={}, seed=0, outcome="scored", reward=2.0)
    assert await Environment("counts", Counts()).metrics([rollout, rollout]) == {"total": 4.0}
    environment = Environment("figures", GivenMetrics({"a": 1}, {"b": 0.5}))
    assert await environment.metrics([]) == {"a": 1.0, "b": 0.5}
    assert await Environment("figures", GivenMetrics(None)).metrics([]) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (5, "hook 'metrics' returned int, expected dict"),
        ({"best": "math"}, "hook 'metrics' returned 'math' for 'best', expected a number"),
    ],
)
async def test_metrics_must_be_numbers(answer, message):
    with pytest.raises(Failed, match=message):
        await Environment("figures", GivenMetrics(answer)).metrics([])
