"""An episode ends in one of three ways: scored, unscorable or failed."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk import (
    BudgetSpent,
    Environment,
    Failed,
    Reset,
    Unscorable,
    UsageError,
    Verdict,
    WorkerLost,
    hookimpl,
    play,
    responses,
)
from gymsdk.errors import BadRow
from gymsdk.models.scripted import build
from gymsdk.types import Budget

from .environments import Log, Notebook, Slow

WITHHELD = {"reason": "content_filter"}


class PreparedModel:
    """A model with a given response."""

    def __init__(self, answer) -> None:
        self.answer = answer

    async def respond(self, request, *, episode=None):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (ValueError("no"), "model_raised", "the model raised ValueError: no"),
        (asyncio.CancelledError(), "model_raised", "the model raised "),
        (TimeoutError("slow"), "model_timeout", "the model raised TimeoutError: slow"),
        (Failed("no server", kind="model_unreachable", retryable=True), "model_unreachable", "no server"),
        (None, "model_bad_answer", "the model did not return a Response object"),
        ({"output": None}, "model_bad_answer", "the model did not return a Response object"),
        ({"output": [], "status": "failed", "error": "overload"}, "model_error", "the model failed: overload"),
        ({"output": [], "error": {"code": "down"}}, "model_error", "the model failed: {'code': 'down'}"),
        ({"output": [], "status": "incomplete", "incomplete_details": WITHHELD}, "model_withheld", ""),
    ],
)
async def test_a_failing_model_fails_its_episode(notebook, task, answer, kind, message):
    rollout = await play(Environment("notebook", notebook), PreparedModel(answer), task)
    assert (rollout.outcome, rollout.reward, rollout.verdict) == ("failed", None, None)
    failure = rollout.failure
    assert (failure.stage, failure.kind, failure.retryable) == ("model", kind, kind != "model_withheld")
    assert failure.message.startswith(message)
    assert notebook.closed == 1


@pytest.mark.parametrize("item", ["text", {"type": ["message"]}, responses.build_message("a") | {"content": [5]}])
async def test_a_response_with_an_unreadable_item_is_a_terminal_failure(notebook, task, item):
    rollout = await play(Environment("notebook", notebook), PreparedModel({"output": [item]}), task)
    failure = rollout.failure
    assert (failure.stage, failure.kind, failure.retryable) == ("model", "model_bad_answer", False)
    assert "item 0 of its output is" in failure.message
    assert notebook.closed == 1


@pytest.mark.parametrize("usage", [None, "many", {"input_tokens": 1.5}, {"input_tokens": "1", "output_tokens": None}])
async def test_unreadable_usage_does_not_fail_the_episode(notebook, task, usage):
    model = PreparedModel({"output": [responses.build_message("done")], "usage": usage})
    assert (await play(Environment("notebook", notebook), model, task)).outcome == "scored"


class FailingHook(Notebook):
    """An environment with one hook that raises a given error."""

    def __init__(self, hook, error) -> None:
        super().__init__()
        self.hook, self.error = hook, error

    def fail_in(self, hook):
        if hook == self.hook:
            raise self.error

    @hookimpl
    def reset(self):
        self.fail_in("reset")
        return Reset(state=Log())

    @hookimpl
    async def step(self):
        self.fail_in("step")

    @hookimpl
    def verify(self):
        self.fail_in("verify")
        return Verdict(reward=1.0)

    @hookimpl
    async def close(self):
        self.closed += 1
        self.fail_in("close")


@pytest.mark.parametrize("hook", ["reset", "step", "verify"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), ExceptionGroup("two", [ValueError("no")])])
async def test_a_hook_that_raises_fails_its_episode_which_is_closed(policy, task, hook, error):
    plugin = FailingHook(hook, error)
    rollout = await play(Environment("breaks", plugin), policy("done"), task)
    assert (rollout.outcome, rollout.reward) == ("failed", None)
    assert (rollout.failure.stage, rollout.failure.kind, rollout.failure.retryable) == (hook, "hook_raised", True)
    expected = "RuntimeError: it ended with SystemExit(3)" if isinstance(error, SystemExit) else "ValueError: no"
    assert rollout.failure.message.startswith(f"hook '{hook}' of environment 'breaks' raised {expected}")
    assert plugin.closed == (hook != "reset")


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        *((hook, Failed("no sandbox", kind="sandbox")) for hook in ("reset", "step", "verify")),
        *((hook, Unscorable("unreadable")) for hook in ("reset", "step")),
        *((hook, BudgetSpent("too much", kind="cpu_spent")) for hook in ("reset", "step")),
    ],
)
async def test_a_failure_keeps_the_kind_that_the_author_gave(policy, task, hook, error):
    rollout = await play(Environment("breaks", FailingHook(hook, error)), policy("a"), task)
    assert (rollout.outcome, rollout.failure.stage, rollout.failure.kind) == ("failed", hook, error.kind)
    assert rollout.failure.message == str(error)


@pytest.mark.parametrize(
    ("error", "outcome", "kind"),
    [
        (Unscorable("unreadable"), "unscorable", "unscorable"),
        (Failed("down", kind="model_unreachable"), "unscorable", "judge_failed"),
        (ExceptionGroup("", [Failed("down", kind="model_timeout")]), "unscorable", "judge_failed"),
        (WorkerLost("killed", kind="worker_killed"), "unscorable", "worker_killed"),
        (ExceptionGroup("", [Unscorable("unreadable")]), "unscorable", "unscorable"),
    ],
)
async def test_an_undecided_verdict_is_unscorable(policy, task, error, outcome, kind):
    rollout = await play(Environment("breaks", FailingHook("verify", error)), policy("done"), task)
    assert (rollout.outcome, rollout.reward, rollout.failure.kind) == (outcome, None, kind)
    assert rollout.failure.stage == "verify"


async def test_a_close_that_fails_does_not_change_the_verdict(policy, task, caplog):
    plugin = FailingHook("close", ValueError("no"))
    rollout = await play(Environment("breaks", plugin), policy("done"), task, id="7:1")
    assert (rollout.outcome, rollout.reward, plugin.closed) == ("scored", 1.0, 1)
    assert "episode 7:1: hook 'close' of environment 'breaks' raised ValueError: no" in caplog.text


async def test_a_cancelled_episode_is_closed_and_stays_cancelled(notebook, task):
    policy = Slow(None)
    playing = asyncio.ensure_future(play(Environment("notebook", notebook), policy, task))
    await policy.is_asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert notebook.closed == 1


async def test_a_row_that_does_not_fit_is_raised_instead_of_failing_an_episode(notebook, policy):
    with pytest.raises(BadRow, match="responses_create_params: Field required"):
        await play(Environment("notebook", notebook), policy("done"), {"question": "?"})
    assert issubclass(BadRow, UsageError)
    assert notebook.closed == 0


async def test_a_tool_that_raises_fails_the_episode_and_is_named(policy, task):
    def dig(where: str):
        raise KeyError(where)

    class Digs(Notebook):
        @hookimpl
        def tools(self):
            return [dig]

    plugin = Digs()
    rollout = await play(Environment("digs", plugin), policy([("dig", {"where": "here"})]), task)
    message, _, line = rollout.failure.message.partition(" (test_outcome.py:")
    assert message == "tool 'dig' of environment 'digs' raised KeyError: 'here'"
    assert int(line.rstrip(")")) == dig.__code__.co_firstlineno + 1
    assert (rollout.failure.stage, rollout.failure.kind, plugin.closed) == ("step", "tool_raised", 1)
    assert [item["type"] for item in rollout.response["output"]] == ["function_call"]


@pytest.mark.slow
async def test_a_step_with_little_time_left_does_not_fail_the_episode(task):
    class Slow:
        async def respond(self, request, *, episode=None):
            await asyncio.sleep(0.95)
            return responses.build_response([responses.build_function_call("rest", "{}", "call_0")], model="slow")

    async def rest():
        await asyncio.sleep(60)

    class Rests(Notebook):
        @hookimpl
        def tools(self):
            return [rest]

    rollout = await play(Environment("rests", Rests()), Slow(), task, budget=Budget(seconds=1.0))
    assert (rollout.outcome, rollout.ended) == ("scored", "deadline")


async def test_an_episode_cannot_change_its_row(task):
    class Scribbles(Notebook):
        @hookimpl
        def verify(self, transcript):
            transcript.opening[0]["content"] = "changed"
            return Verdict(reward=1.0)

    await play(Environment("scribbles", Scribbles()), build("null"), task)
    assert task.input[0]["content"] != "changed"


async def test_names_in_place_of_objects_are_rejected(task):
    with pytest.raises(UsageError, match=r"write gymsdk.load\('math'\)"):
        await play("math", build("null"), task)
    with pytest.raises(UsageError, match=r"write gymsdk.model\('scripted/oracle'\)"):
        await play(Environment("notes", Notebook()), "scripted/oracle", task)
