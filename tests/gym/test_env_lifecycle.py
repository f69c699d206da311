"""The lifecycle of an environment: threads, forks, copies, interruptions, and interpreter exit."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from gymsdk import Environment, UsageError
from gymsdk.gym import slot
from gymsdk.gym.env import Env

from .conftest import HOST, call

# Since Python 3.12 a fork beside a thread gives a warning. These tests check what happens after such a fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

Make = Callable[..., Env]

SCRIPT = "from gymsdk import *\nfrom typing import *\nimport asyncio\n"


def wait_for_tool(host: ModuleType) -> None:
    assert host.inside.acquire(timeout=30), "the tool was not called"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.01)


def run_script(script: str, *, send: int | None = None) -> tuple[int, str, str]:
    """Run *script* in a new interpreter and return its exit code, stdout and stderr; signal *send* after the first
    line.
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first = ""
    if send:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(send)
    out, error = process.communicate(timeout=60)
    return process.returncode, first + out, error


PRINTING_LOG = """
class Log:
    def append(self, word):
        print(word, flush=True)

log = Log()
"""


@pytest.fixture
def build_host_script(installed: Callable[..., Path]) -> Callable[..., str]:
    """Return a function that builds the start of a script; the script's `env` prints its log."""

    def build_script(source: str = HOST) -> str:
        installed("host", SCRIPT + source + PRINTING_LOG)
        return "from gymsdk.gym import Env\nenv = Env('host')\nenv.reset(seed=1)\n"

    return build_script


def test_environments_in_two_threads_run_concurrently(env: Make, host: ModuleType) -> None:
    def play(counter: Env) -> bool:
        counter.reset(seed=1)
        return not counter.step(call("hang"))[2]

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(play, counter) for counter in (env(), env())]
        wait_for_tool(host)
        wait_for_tool(host)
        host.gate.set()
        assert all(item.result() for item in both)


def test_use_from_a_second_thread_is_rejected(env: Make, host: ModuleType) -> None:
    counter = env()
    counter.reset(seed=1)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(counter.step, call("hang"))
        wait_for_tool(host)
        for use in (counter.reset, counter.close, lambda: counter.step("Three.")):
            with pytest.raises(UsageError, match="create one environment per thread"):
                use()
        host.gate.set()
        assert step.result()[0][0]["content"] == "woken"


@contextmanager
def interrupted_in_a_hook(host: ModuleType) -> Iterator[None]:
    """Send Ctrl-C as soon as a hook or tool in the block hangs, and expect the interruption."""

    def interrupt() -> None:
        wait_for_tool(host)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()


@pytest.mark.parametrize("tool", ["hang", "doze"])
def test_ctrl_c_in_a_step_closes_the_episode_and_leaves_the_environment_usable(
    env: Make, host: ModuleType, tool: str
) -> None:
    counter = env()
    counter.reset(seed=1)
    with interrupted_in_a_hook(host):
        counter.step(call(tool))
    assert host.log == ["entered", "opened", "closed"]
    with pytest.raises(ResetNeeded):
        counter.step("Three.")
    counter.reset(seed=1)
    counter.step(call("add", by=3))
    assert counter.step("Three.")[1] == 1.0
    assert host.log.count("opened") == host.log.count("closed") == 2


def test_ctrl_c_in_a_reset_leaves_the_environment_usable(env: Make, host: ModuleType) -> None:
    counter = env(settings={"breaks": "hanging"})
    with interrupted_in_a_hook(host):
        counter.reset(seed=1)
    with pytest.raises(ResetNeeded):
        counter.step("Three.")
    host.gate.set()
    counter.reset(seed=1)
    assert counter.step("Three.")[2]


@pytest.mark.slow
def test_a_deleted_environment_is_closed(host: ModuleType) -> None:
    counter = Env(Environment("host", host))
    counter.reset(seed=1)
    del counter
    gc.collect()
    wait_until(lambda: host.log == ["entered", "opened", "closed", "left"])
    wait_until(lambda: not slot._detached)


@pytest.mark.slow
def test_a_blocking_close_hook_runs_at_exit(build_host_script: Callable[..., str]) -> None:
    assert run_script(build_host_script(HOST.replace("async def close", "def close"))) == (
        0,
        "entered\nopened\nclosed\nleft\n",
        "",
    )


@pytest.mark.slow
def test_a_hanging_close_hook_does_not_block_exit(build_host_script: Callable[..., str]) -> None:
    source = HOST.replace('log.append("closed")', "await asyncio.sleep(3600)")
    code, out, error = run_script(
        "import gymsdk.environment\ngymsdk.environment.CLOSE_SECONDS = 0.1\n" + build_host_script(source)
    )
    assert (code, out) == (0, "entered\nopened\nleft\n")
    assert "did not return by its deadline" in error


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["hang", "doze"])
def test_a_step_that_hangs_in_a_thread_does_not_block_exit(build_host_script: Callable[..., str], tool: str) -> None:
    script = f"""
import threading, env_host
action = [{{"type": "function_call", "name": {tool!r}, "arguments": "{{}}"}}]
threading.Thread(target=env.step, args=(action,), daemon=True).start()
env_host.inside.acquire()
"""
    assert run_script(build_host_script() + script) == (0, "entered\nopened\nclosed\nleft\n", "")


@pytest.mark.slow
def test_an_environment_closed_by_a_later_atexit_callback_does_not_block_exit(
    build_host_script: Callable[..., str],
) -> None:
    late = "import atexit\natexit.register(lambda: (env.close(), print('late')))\n"
    assert run_script(late + build_host_script()) == (0, "entered\nopened\nclosed\nleft\nlate\n", "")


@pytest.mark.slow
def test_ctrl_c_outside_a_step_ends_the_interpreter_and_closes_the_episode(
    build_host_script: Callable[..., str],
) -> None:
    code, out, error = run_script(build_host_script() + "import signal; signal.pause()\n", send=signal.SIGINT)
    assert out.splitlines()[-2:] == ["closed", "left"] or "KeyboardInterrupt" in error
    assert code != 0


def run_in_fork(work: Callable[[], None]) -> int:
    """Run *work* in a forked child and return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def test_after_a_fork_the_child_starts_anew_and_the_parent_continues(env: Make, host: ModuleType) -> None:
    counter = env()
    counter.reset(seed=1)

    def work() -> None:
        host.log.clear()
        with pytest.raises(ResetNeeded):
            counter.step("Three.")
        counter.reset(seed=1)
        counter.step(call("add", by=3))
        assert counter.step("Three.")[1] == 1.0
        counter.close()
        assert host.log == ["entered", "opened", "closed", "left"], host.log

    assert run_in_fork(work) == 0
    counter.step(call("add", by=3))
    assert counter.step("Three.")[1] == 1.0
    assert host.log == ["entered", "opened", "closed"]


@pytest.mark.slow
def test_an_exiting_child_does_not_close_what_its_parent_opened(build_host_script: Callable[..., str]) -> None:
    script = (
        build_host_script() + "import os, sys\nchild = os.fork()\nif child: os.waitpid(child, 0); print('parent')\n"
    )
    code, out, error = run_script(script)
    assert (code, error) == (0, "")
    assert out.splitlines() == ["entered", "opened", "parent", "closed", "left"]


@pytest.mark.slow
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_is_an_independent_environment(duplicate: Callable[[Env], Env]) -> None:
    env = Env("math", turns=3, families=["linear"])
    env.action_space.seed(4)
    env.np_random = np.random.default_rng(3)
    duplicate_env = duplicate(env)
    assert duplicate_env.reset(options={"task": 2}) == env.reset(options={"task": 2})
    assert duplicate_env.step("One.")[2]
    assert env.step("One.")[2]
    assert duplicate_env.action_space.sample() == env.action_space.sample()
    env.close()
    assert duplicate_env.reset(seed=1)[0]
    duplicate_env.close()


def test_an_environment_with_gymnasiums_wrappers_can_be_copied(registered: list[str]) -> None:
    env = gymnasium.make(
        "nemo/math", tasks=[{"responses_create_params": {"input": "?"}, "question": "?", "expected_answer": "1"}]
    )
    duplicate_env = copy.deepcopy(env)
    assert duplicate_env.reset(seed=1) == env.reset(seed=1)
    assert duplicate_env.spec == env.spec
    env.close()
    duplicate_env.close()


def test_an_environment_that_cannot_be_copied_says_why(env: Make) -> None:
    with pytest.raises(UsageError, match="use an environment's name"):
        copy.deepcopy(env())
    busy = Env("math")
    busy.reset(seed=1)
    with pytest.raises(UsageError, match=r"call close\(\) first"):
        pickle.dumps(busy)
    busy.close()
    assert pickle.dumps(busy)
