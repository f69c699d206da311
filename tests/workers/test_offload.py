from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gymsdk import offload
from gymsdk.errors import Failed, Unscorable, UsageError
from gymsdk.workers.offload import InlineExecutor, get_executor, get_worker_count, use_executor
from gymsdk.workers.processes import ProcessExecutor


@offload()
def echo(value: object, *, twice: bool = False) -> object:
    return [value, value] if twice else value


@offload()
def process_id() -> int:
    return os.getpid()


@offload()
def twice_nested() -> list[int]:
    return asyncio.run(nested())


async def nested() -> list[int]:
    return [os.getpid(), await process_id()]


def plain(value: int) -> int:
    return value


renamed = offload()(plain)


@pytest.fixture(autouse=True)
def chosen(local: ProcessExecutor) -> Iterator[ProcessExecutor]:
    with use_executor(local):
        yield local


async def test_a_call_runs_in_another_process_and_returns_its_value(local: ProcessExecutor) -> None:
    assert get_executor() is local
    assert await process_id() != os.getpid()
    assert await echo({"a": 1}, twice=True) == [{"a": 1}, {"a": 1}]
    assert await renamed(3) == 3, "a function is found under another name"
    # A call inside a worker runs there, and the wrapped function in this process.
    outer, inner = await twice_nested()
    assert outer == inner != os.getpid() == process_id.__wrapped__()
    with use_executor(InlineExecutor()):
        assert await process_id() == os.getpid()


def test_an_offloaded_function_keeps_its_name_and_signature() -> None:
    assert inspect.iscoroutinefunction(echo)
    assert str(inspect.signature(echo)) == "(value: 'object', *, twice: 'bool' = False) -> 'object'"


def test_loops_one_after_another_and_in_several_threads_share_the_workers(local: ProcessExecutor) -> None:
    async def calls() -> list[object]:
        with use_executor(local):
            return await asyncio.gather(process_id(), *(echo(number) for number in range(30)))

    with ThreadPoolExecutor(3) as pool:
        results = [*pool.map(asyncio.run, (calls() for _ in range(3))), asyncio.run(calls())]
    assert [values for _, *values in results] == [[*range(30)]] * 4
    assert len({process for process, *_ in results}) <= 2


def test_zero_workers_mean_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_WORKERS", "0")
    assert get_worker_count() == 0
    monkeypatch.setenv("GYMSDK_WORKERS", "many")
    with pytest.raises(UsageError, match="GYMSDK_WORKERS is 'many'; set it to a number"):
        get_worker_count()


class Holder:
    def method(self) -> None: ...


async def coroutine() -> None: ...


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "cannot be offloaded.*move it"),
        (Holder.method, "cannot be offloaded.*move it"),
        (coroutine, "cannot be offloaded.*it is `async`"),
        (numbers, "cannot be offloaded.*return a list"),
        (Holder, "cannot be offloaded.*write a `def`"),
    ],
)
def test_an_unsuitable_function_or_limit_is_refused_when_decorated(function: Callable[[], object], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        offload()(function)
    with pytest.raises(TypeError, match=r"write `@offload\(\)` with parentheses"):
        offload(function)
    for limits in ({"cpu": 0.0}, {"timeout": 0.0}, {"timeout": -1.0, "cpu": 1.0}):
        with pytest.raises(ValueError, match="cpu and timeout must be positive"):
            offload(**limits)


class Unreadable(Exception):
    """An exception that does not survive a pipe."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.held = threading.Lock()


@offload()
def divide(number: int) -> float:
    return number / 0


@offload()
def fail(kind: str) -> None:
    raise {
        "failed": Failed("the gold answer is unreadable", kind="gold"),
        "unscorable": Unscorable("no verdict", kind="gold", retryable=True),
        "missing": FileNotFoundError(2, "No such file", "gold.json"),
        "stop": StopIteration("over"),
        "exit": SystemExit(3),
        "cancelled": asyncio.CancelledError(),
        "unreadable": Unreadable("locked"),
    }[kind]


@offload()
def generator() -> object:
    return (number for number in range(3))


@offload()
def descend() -> int:
    return descend.__wrapped__() + 1


@pytest.mark.slow
async def test_an_exception_is_raised_as_itself_with_what_it_carries_and_the_workers_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        await divide(1)
    assert "in divide" in raised.value.__notes__[0]
    with pytest.raises(Failed, match="gold answer") as failed:
        await fail("failed")
    assert failed.value.kind == "gold"
    with pytest.raises(Unscorable, match="no verdict") as unscorable:
        await fail("unscorable")
    assert (unscorable.value.kind, unscorable.value.retryable) == ("gold", True)
    with pytest.raises(FileNotFoundError) as missing:
        await fail("missing")
    assert missing.value.filename == "gold.json"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (generator, Failed, "generator returned a generator, which cannot be pickled"),
        (lambda: echo(threading.Lock()), Failed, r"echo uses an object that cannot be sent to a worker .*lock"),
        (lambda: fail("exit"), Failed, "fail ended with SystemExit"),
        (lambda: fail("cancelled"), Failed, "fail ended with CancelledError"),
        (
            lambda: fail("unreadable"),
            Failed,
            r"(?s)fail raised an exception that cannot be pickled.*Unreadable: locked",
        ),
        (lambda: fail("stop"), RuntimeError, "StopIteration"),
    ],
    ids=["value", "argument", "exit", "cancelled", "exception", "stop iteration"],
)
async def test_what_cannot_be_sent_or_raised_is_described(
    call: Callable[[], Awaitable[object]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await call()


async def test_endless_recursion_is_an_exception_like_any_other() -> None:
    before = await process_id()
    with pytest.raises(RecursionError):
        await descend()
    assert await process_id() == before


async def test_a_module_that_cannot_be_imported_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    module = folder / "shortlived.py"
    module.write_text("from gymsdk import offload\n\n\n@offload()\ndef grade():\n    return 1\n")
    monkeypatch.syspath_prepend(str(folder))
    import shortlived  # type: ignore[import-not-found]  # written three lines above

    module.unlink()
    monkeypatch.undo()
    with pytest.raises(ModuleNotFoundError, match="shortlived"):
        await shortlived.grade()
