"""Author code that hangs, raises or returns late ends its own episode at the deadline, and no other episode."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time

import pytest

from gymsdk import Environment, Failed, Reset, Step, Verdict, hookimpl, play, responses
from gymsdk.concurrency import ThreadPool
from gymsdk.plugins.calls import Deadline, HookRunner, get_loop_time_after, run_stage
from gymsdk.responses import build_usage, record_usage
from gymsdk.types import Budget

SECONDS = 1.0
"""A deadline that only hanging code exceeds."""


class Hangs:
    """An environment that hangs in a given hook or tool, sync or async, until *stuck* is set."""

    def __init__(self, stuck: threading.Event, where: str) -> None:
        self.stuck, self.where = stuck, where
        self.closed = 0

    def hang_in_thread(self, where):
        if where == self.where:
            self.stuck.wait()

    async def hang_on_loop(self, where):
        if where == self.where:
            await asyncio.Event().wait()

    @hookimpl
    def reset(self):
        self.hang_in_thread("reset")
        return Reset()

    @hookimpl
    async def step(self):
        await self.hang_on_loop("step")

    @hookimpl
    def tools(self):
        def dig():
            self.hang_in_thread("dig")

        async def wait():
            await self.hang_on_loop("wait")

        return [dig, wait]

    @hookimpl
    def verify(self):
        return Verdict(reward=1.0)

    @hookimpl
    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("where", "stage", "kind", "named"),
    [
        ("reset", "reset", "hook_timeout", "hook 'reset'"),
        ("step", "step", "hook_timeout", "hook 'step'"),
        ("dig", "step", "tool_timeout", "tool 'dig'"),
        ("wait", "step", "tool_timeout", "tool 'wait'"),
    ],
)
async def test_a_hanging_function_ends_its_episode_at_the_deadline(stuck, policy, task, where, stage, kind, named):
    plugin = Hangs(stuck, where)
    model = policy([("dig", {}), ("wait", {})], "done")
    started = asyncio.get_running_loop().time()
    rollout = await play(Environment("hangs", plugin), model, task, budget=Budget(seconds=SECONDS))
    assert asyncio.get_running_loop().time() - started >= SECONDS
    assert (rollout.outcome, rollout.failure.stage, rollout.failure.kind) == ("failed", stage, kind)
    assert rollout.failure.message == f"{named} of environment 'hangs' did not return by its deadline"
    assert rollout.failure.retryable
    assert plugin.closed == (where != "reset")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["dig", "wait"])
async def test_six_hanging_hooks_do_not_block_a_seventh(stuck, policy, task, where):
    environment = Environment("hangs", Hangs(stuck, where))
    hanging = [play(environment, policy([(where, {})]), task, budget=Budget(seconds=SECONDS)) for _ in range(6)]
    seventh = play(environment, policy([("wait" if where == "dig" else "dig", {})], "done"), task)
    *rollouts, last = await asyncio.gather(*hanging, seventh)
    assert {rollout.failure.kind for rollout in rollouts} == {"tool_timeout"}
    assert (last.outcome, last.reward) == ("scored", 1.0)


@pytest.mark.slow
async def test_a_hook_that_suppresses_its_cancellation_is_abandoned(policy, task):
    released = asyncio.Event()

    class Stubborn:
        @hookimpl
        async def verify(self): ...

        @hookimpl
        async def step(self):
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue

    rollout = await play(Environment("stubborn", Stubborn()), policy("done"), task, budget=Budget(seconds=SECONDS))
    assert (rollout.failure.stage, rollout.failure.kind) == ("step", "hook_timeout")
    released.set()


class Grades:
    """An environment that returns a given verdict in a given way."""

    def __init__(self, verify) -> None:
        self._verify = verify

    @hookimpl
    def verify(self):
        return self._verify()


async def grade():
    await asyncio.sleep(0)
    return Verdict(reward=0.5)


@functools.wraps(grade)
def wrapped():
    return grade()


@pytest.mark.parametrize("verify", [grade, wrapped, functools.partial(grade)])
async def test_a_synchronous_function_may_return_an_awaitable(policy, task, verify):
    rollout = await play(Environment("grades", Grades(verify)), policy("done"), task)
    assert rollout.reward == 0.5


async def test_a_timeout_error_of_the_author_is_an_ordinary_error(policy, task):
    class Impatient(Grades):
        @hookimpl
        async def step(self):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)

    rollout = await play(Environment("impatient", Impatient(grade)), policy("done"), task)
    assert rollout.failure.kind == "hook_raised"
    assert "hook 'step' of environment 'impatient' raised TimeoutError" in rollout.failure.message


async def test_a_warning_names_an_async_hook_that_blocks_the_loop(policy, task, caplog):
    class Holds(Grades):
        @hookimpl
        async def step(self):
            time.sleep(0.08)  # noqa: ASYNC251  # blocks the loop on purpose
            return Step(done=True)

    await play(Environment("holds", Holds(grade)), policy("done"), task)
    assert "hook 'step' of environment 'holds' held the event loop for " in caplog.text


async def test_a_synchronous_hook_does_not_run_on_the_loop(policy, task, caplog):
    class Blocks(Grades):
        @hookimpl
        def step(self):
            time.sleep(0.08)
            assert threading.current_thread() is not threading.main_thread()
            return Step(done=True)

    rollout = await play(Environment("blocks", Blocks(grade)), policy("done"), task)
    assert rollout.outcome == "scored"
    assert caplog.text == ""


@pytest.mark.parametrize("sync", [True, False])
async def test_token_usage_recorded_in_a_hook_belongs_to_the_episode(policy, task, sync):
    def record():
        record_usage("judge", {"usage": build_usage(3, 1)})
        return Verdict(reward=1.0)

    async def record_later():
        return record()

    environment = Environment("grades", Grades(record if sync else record_later))
    rollouts = await asyncio.gather(*(play(environment, policy("done"), task) for _ in range(5)))
    assert {rollout.usage["judge"].total_tokens for rollout in rollouts} == {4}


async def test_an_error_has_the_stage_in_which_it_occurred():
    author = HookRunner("one")

    async def fail():
        raise Failed("down", kind="sandbox")

    with pytest.raises(Failed) as caught, run_stage("step", Deadline(get_loop_time_after(1))):
        await author.run("tool 'dig'", fail, {})
    assert caught.value.stage == "step"


async def test_the_wait_for_a_thread_counts_towards_the_deadline(task):
    release = threading.Event()
    author = HookRunner("crowded")
    author.threads = ThreadPool(1)

    async def run(seconds):
        with run_stage("step", Deadline(get_loop_time_after(seconds))):
            return await author.run("hook 'step'", release.wait, {})

    first = asyncio.ensure_future(run(60))
    await asyncio.sleep(0)
    with pytest.raises(Failed, match="hook 'step' of environment 'crowded' did not return by its deadline"):
        await run(0.1)
    release.set()
    assert await first is True


async def test_a_coroutine_that_does_not_start_before_its_deadline_causes_no_warning(recwarn):
    async def return_one():
        return 1

    def return_coroutine():
        return return_one()

    author = HookRunner("made")
    with run_stage("verify", Deadline(get_loop_time_after(-1.0))):
        for function in (return_one, return_coroutine):
            with pytest.raises(Failed):
                await author.run("hook 'verify'", function, {})
    gc.collect()
    assert not [str(item.message) for item in recwarn.list if "never awaited" in str(item.message)]


class Panic(BaseException):
    """The exception of a Rust extension that panics."""


@pytest.mark.parametrize(
    "raised", [Panic("out of bounds"), SystemExit(0), asyncio.CancelledError(), Panic("x" * 10**6)]
)
async def test_the_message_about_a_base_exception_leaves_out_the_hooks_arguments(task, raised):
    class Panics:
        @hookimpl
        def verify(self, task):
            raise raised

    gold = task.model_copy(update={"gold": "the gold answer " * 100_000})
    environment = Environment("panics", Panics())
    rollout = await play(environment, Silent(), gold)
    failure = rollout.failure
    assert (failure.stage, failure.kind) == ("verify", "hook_raised")
    assert failure.message.startswith("hook 'verify' of environment 'panics' raised RuntimeError: it ended with ")
    assert "gold" not in failure.message
    assert len(failure.message) < 1000


class Silent:
    async def respond(self, request, *, episode=None):
        return responses.build_response([], model="silent")
