"""The `verify` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import threading
import time

import pytest
from pydantic import ValidationError

from gymsdk import BudgetSpent, Environment, Failed, Unscorable, Verdict, WorkerLost, environment, hookimpl, responses

from .environments import Question, Settings

NEVER = 999.0
REPLY = responses.build_message("42")


async def test_verify_receives_the_state_and_the_transcript(recorded, recorder):
    episode = await recorded.reset(Question.ask("?"))
    episode.transcript.items.append(REPLY)
    assert await recorded.verify(episode) == Verdict(reward=1.0)
    assert recorder.given["verify"] == {"state": episode.state, "reply": "42", "config": Settings(level=3)}


class GivenVerdicts:
    """An environment with a `verify` hook that returns given results in turn."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.calls = 0

    @hookimpl
    def verify(self):
        self.calls += 1
        answer = self.answers[min(self.calls, len(self.answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def run_verify(plugin, task):
    verifies = Environment("verifies", plugin)
    return await verifies.verify(await verifies.reset(task))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "hook 'verify' returned NoneType, expected Verdict"),
        (1.0, "hook 'verify' returned float, expected Verdict"),
        (Verdict(reward=1.0, components={"a": 0.5}), "the verdict's components sum to 0.5, its reward is 1"),
        (Verdict(reward=1.0, components={"a": float("nan")}), "the verdict's components sum to nan, its reward is 1"),
        (
            Verdict(reward=1.0, components={"steps": 1.0}),
            "the component 'steps' is reserved for the rewards of the steps; rename the verdict's",
        ),
    ],
)
async def test_verify_must_return_a_verdict_with_a_correct_sum(task, answer, message):
    with pytest.raises(Failed, match=message) as caught:
        await run_verify(GivenVerdicts(answer), task)
    assert (caught.value.stage, caught.value.kind) == ("verify", "bad_answer")


@pytest.mark.parametrize(
    ("answer", "message", "kind"),
    [
        *(
            (Verdict(reward=float(reward)), f"the verdict's reward is {reward}", "not_finite")
            for reward in ("nan", "inf", "-inf")
        ),
        (Unscorable("no gold", kind="gold_unreadable"), "no gold", "gold_unreadable"),
    ],
)
async def test_verify_without_a_finite_reward_is_unscorable(task, answer, message, kind):
    with pytest.raises(Unscorable, match=message) as caught:
        await run_verify(GivenVerdicts(answer), task)
    assert (caught.value.stage, caught.value.kind) == ("verify", kind)


async def test_verify_that_lost_its_worker_runs_once_more(task):
    lost = WorkerLost("killed", kind="worker_killed", retryable=True)
    spent = BudgetSpent("too much", kind="cpu_spent")
    assert await run_verify(GivenVerdicts(lost, Verdict(reward=1.0)), task) == Verdict(reward=1.0)
    for answers in ([spent], [lost, spent]):
        assert await run_verify(GivenVerdicts(*answers), task) == Verdict(reward=0.0, grader_timeout=True)
    plugin = GivenVerdicts(lost)
    with pytest.raises(Unscorable, match="killed") as caught:
        await run_verify(plugin, task)
    assert (caught.value.kind, caught.value.retryable, plugin.calls) == ("worker_killed", True, 2)


class Grader:
    """An environment whose `verify` is a plain function that does *work* until the test ends."""

    def __init__(self, work, seconds=NEVER) -> None:
        self.work, self.seconds, self.stop = work, seconds, threading.Event()

    @hookimpl
    def verify(self):
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and not self.stop.is_set():
            self.work()
        return Verdict(reward=1.0)


def work_slowly():
    sum(range(500_000))
    time.sleep(0.1)


@pytest.mark.slow
async def test_a_plain_verify_takes_as_long_as_it_works(task, monkeypatch):
    monkeypatch.setattr(environment, "VERIFY_SECONDS", 2.0)
    assert (await run_verify(Grader(work_slowly, seconds=5.0), task)).reward == 1.0


@pytest.mark.slow
async def test_a_plain_verify_that_uses_up_its_cpu_time_gives_a_reward_of_0_with_grader_timeout(task, monkeypatch):
    monkeypatch.setattr(environment, "VERIFY_SECONDS", 0.2)
    grader = Grader(lambda: sum(range(10_000)))
    try:
        assert await run_verify(grader, task) == Verdict(reward=0.0, grader_timeout=True)
    finally:
        grader.stop.set()


@pytest.mark.slow
async def test_a_plain_verify_that_uses_no_cpu_time_fails(task, monkeypatch):
    monkeypatch.setattr(environment, "VERIFY_SECONDS", 2.0)
    grader = Grader(lambda: time.sleep(1.0))
    try:
        with pytest.raises(Failed, match="it has used no CPU time for 2 s") as caught:
            await run_verify(grader, task)
    finally:
        grader.stop.set()
    assert (caught.value.stage, caught.value.kind) == ("verify", "hook_timeout")


async def test_a_verdict_with_an_unknown_field_fails_with_the_advice_to_subclass(task):
    class Adds:
        @hookimpl
        def verify(self):
            return Verdict(reward=1.0, extracted="42")

    with pytest.raises(
        Failed, match=r"Verdict has no field 'extracted'.* subclass Verdict and declare it there"
    ) as caught:
        await run_verify(Adds(), task)
    assert (caught.value.stage, caught.value.kind) == ("verify", "hook_raised")


def test_a_misspelt_field_of_a_subclass_is_named_unless_it_allows_any_field():
    class Graded(Verdict):
        extracted: str = ""

    class Open(Verdict, extra="allow"):
        pass

    with pytest.raises(ValidationError, match=r"no field 'extractd'; did you mean 'extracted'.* declare it in Graded"):
        Graded(reward=1.0, extractd="42")
    assert Open(reward=1.0, foo=3).model_dump()["foo"] == 3
