"""An environment's life: threads, forks, copies, interruptions, and the end that nobody waited for."""

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from gymsdk import Environment, UsageError
from gymsdk.gym import loop
from gymsdk.gym.env import Env

from .conftest import HOST, call

# From Python 3.12 on, to fork beside a thread is warned of: what comes of it is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

Make = Callable[..., Env]

SCRIPT = "from gymsdk import *\nfrom typing import *\nimport asyncio\n"


def begun(host: ModuleType) -> None:
    assert host.inside.acquire(timeout=30), "the tool was called"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def told(script: str, *, send: int | None = None) -> tuple[int, str, str]:
    """Give how a new interpreter ended, what it printed, and what it complained of; *send* at its first line."""
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


PRINTED = """
class Log:
    def append(self, word):
        print(word, flush=True)

log = Log()
"""


@pytest.fixture
def hosted(installed: Callable[..., Path]) -> Callable[..., str]:
    """Gives the head of a script in which `env` is an environment that prints what it opens and closes."""

    def head(source: str = HOST) -> str:
        installed("host", SCRIPT + source + PRINTED)
        return "from gymsdk.gym import Env\nenv = Env('host')\nenv.reset(seed=1)\n"

    return head


def test_environments_in_two_threads_overlap(env: Make, host: ModuleType) -> None:
    def played(counting: Env) -> bool:
        counting.reset(seed=1)
        return not counting.step(call("hang"))[2]

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(played, counting) for counting in (env(), env())]
        begun(host)
        begun(host)
        host.gate.set()
        assert all(each.result() for each in both)


def test_a_second_thread_is_refused(env: Make, host: ModuleType) -> None:
    counting = env()
    counting.reset(seed=1)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(counting.step, call("hang"))
        begun(host)
        for use in (counting.reset, counting.close, lambda: counting.step("Three.")):
            with pytest.raises(UsageError, match="create one environment per thread"):
                use()
        host.gate.set()
        assert step.result()[0][0]["content"] == "woken"


@pytest.mark.parametrize("tool", ["hang", "doze"])
def test_ctrl_c_in_a_step_closes_the_episode_and_leaves_the_environment_usable(
    env: Make, host: ModuleType, tool: str
) -> None:
    counting = env()
    counting.reset(seed=1)

    def interrupt() -> None:
        begun(host)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        counting.step(call(tool))
    thread.join()
    assert host.log == ["entered", "opened", "closed"]
    with pytest.raises(ResetNeeded):
        counting.step("Three.")
    counting.reset(seed=1)
    counting.step(call("add", by=3))
    assert counting.step("Three.")[1] == 1.0
    assert host.log.count("opened") == host.log.count("closed") == 2


def test_ctrl_c_in_a_reset_leaves_the_environment_usable(env: Make, host: ModuleType) -> None:
    counting = env(settings={"breaks": "hanging"})

    def interrupt() -> None:
        begun(host)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        counting.reset(seed=1)
    thread.join()
    with pytest.raises(ResetNeeded):
        counting.step("Three.")
    host.gate.set()
    counting.reset(seed=1)
    assert counting.step("Three.")[2]


def test_an_environment_deleted_is_closed(host: ModuleType) -> None:
    counting = Env(Environment("host", host))
    counting.reset(seed=1)
    del counting
    gc.collect()
    until(lambda: host.log == ["entered", "opened", "closed", "left"])
    until(lambda: not loop._detached)


def test_an_episode_open_at_exit_is_closed(hosted: Callable[..., str]) -> None:
    assert told(hosted()) == (0, "entered\nopened\nclosed\nleft\n", "")


def test_a_close_that_blocks_a_thread_runs_at_exit_too(hosted: Callable[..., str]) -> None:
    assert told(hosted(HOST.replace("async def close", "def close"))) == (0, "entered\nopened\nclosed\nleft\n", "")


def test_a_close_that_hangs_does_not_keep_the_interpreter(hosted: Callable[..., str]) -> None:
    source = HOST.replace('log.append("closed")', "await asyncio.sleep(3600)")
    code, out, error = told("import gymsdk.environment\ngymsdk.environment.CLOSE_SECONDS = 0.1\n" + hosted(source))
    assert (code, out) == (0, "entered\nopened\nleft\n")
    assert "did not return by its deadline" in error


@pytest.mark.parametrize("tool", ["hang", "doze"])
def test_a_step_that_hangs_in_a_thread_does_not_keep_the_interpreter(hosted: Callable[..., str], tool: str) -> None:
    script = f"""
import threading, env_host
action = [{{"type": "function_call", "name": {tool!r}, "arguments": "{{}}"}}]
threading.Thread(target=env.step, args=(action,), daemon=True).start()
env_host.inside.acquire()
"""
    assert told(hosted() + script) == (0, "entered\nopened\nclosed\nleft\n", "")


def test_an_environment_closed_later_still_does_not_keep_the_interpreter(hosted: Callable[..., str]) -> None:
    late = "import atexit\natexit.register(lambda: (env.close(), print('late')))\n"
    assert told(late + hosted()) == (0, "entered\nopened\nclosed\nleft\nlate\n", "")


def test_an_environment_closed_is_not_closed_again_at_exit(hosted: Callable[..., str]) -> None:
    assert told(hosted() + "env.close()\n") == (0, "entered\nopened\nclosed\nleft\n", "")


def test_ctrl_c_outside_a_step_ends_the_interpreter_and_closes_the_episode(hosted: Callable[..., str]) -> None:
    code, out, error = told(hosted() + "import signal; signal.pause()\n", send=signal.SIGINT)
    assert out.splitlines()[-2:] == ["closed", "left"] or "KeyboardInterrupt" in error
    assert code != 0


def forked(work: Callable[[], None]) -> int:
    """Give the exit code of a child that has done *work*."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def test_after_a_fork_the_environment_begins_anew_there_and_goes_on_here(env: Make, host: ModuleType) -> None:
    counting = env()
    counting.reset(seed=1)

    def work() -> None:
        host.log.clear()
        with pytest.raises(ResetNeeded):
            counting.step("Three.")
        counting.reset(seed=1)
        counting.step(call("add", by=3))
        assert counting.step("Three.")[1] == 1.0
        counting.close()
        assert host.log == ["entered", "opened", "closed", "left"], host.log

    assert forked(work) == 0
    counting.step(call("add", by=3))
    assert counting.step("Three.")[1] == 1.0
    assert host.log == ["entered", "opened", "closed"]


def test_an_environment_made_in_a_fork_works(env: Make, host: ModuleType) -> None:
    env().reset(seed=1)

    def work() -> None:
        counting = env()
        counting.reset(seed=1)
        assert counting.step("Three.")[2]

    assert forked(work) == 0


def test_a_child_that_ends_does_not_close_what_its_parent_opened(hosted: Callable[..., str]) -> None:
    script = hosted() + "import os, sys\nchild = os.fork()\nif child: os.waitpid(child, 0); print('parent')\n"
    code, out, error = told(script)
    assert (code, error) == (0, "")
    assert out.splitlines() == ["entered", "opened", "parent", "closed", "left"]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_is_an_environment_of_its_own(duplicate: Callable[[Env], Env]) -> None:
    env = Env("math", turns=3, families=["linear"])
    env.action_space.seed(4)
    env.np_random = np.random.default_rng(3)
    twin = duplicate(env)
    assert twin.reset(options={"task": 2}) == env.reset(options={"task": 2})
    assert twin.step("One.")[2]
    assert env.step("One.")[2]
    assert twin.action_space.sample() == env.action_space.sample()
    env.close()
    assert twin.reset(seed=1)[0]
    twin.close()


def test_gymnasiums_whole_stack_is_copied(registered: list[str]) -> None:
    env = gymnasium.make(
        "nemo/math", tasks=[{"responses_create_params": {"input": "?"}, "question": "?", "expected_answer": "1"}]
    )
    twin = copy.deepcopy(env)
    assert twin.reset(seed=1) == env.reset(seed=1)
    assert twin.spec == env.spec
    env.close()
    twin.close()


def test_what_cannot_be_copied_says_why(env: Make) -> None:
    with pytest.raises(UsageError, match="use an environment's name"):
        copy.deepcopy(env())
    busy = Env("math")
    busy.reset(seed=1)
    with pytest.raises(UsageError, match=r"call close\(\) first"):
        pickle.dumps(busy)
    busy.close()
    assert pickle.dumps(busy)
