from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from gymsdk import offload
from gymsdk.errors import UsageError
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


@pytest.fixture(scope="module")
def local() -> Iterator[ProcessExecutor]:
    workers = ProcessExecutor(2)
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def chosen(local: ProcessExecutor) -> Iterator[ProcessExecutor]:
    with use_executor(local):
        yield local


async def test_a_call_runs_in_another_process_and_returns_its_value() -> None:
    assert await process_id() != os.getpid()
    assert await echo({"a": 1}, twice=True) == [{"a": 1}, {"a": 1}]


async def test_the_wrapped_function_runs_in_this_process() -> None:
    assert process_id.__wrapped__() == os.getpid()


def test_an_offloaded_function_keeps_its_name_and_signature() -> None:
    assert inspect.iscoroutinefunction(echo)
    assert str(inspect.signature(echo)) == "(value: 'object', *, twice: 'bool' = False) -> 'object'"


async def test_an_offloaded_call_inside_a_worker_runs_there() -> None:
    outer, inner = await twice_nested()
    assert outer == inner != os.getpid()


async def test_a_function_is_found_under_another_name() -> None:
    assert await renamed(3) == 3


def test_several_loops_one_after_another_share_the_workers(local: ProcessExecutor) -> None:
    async def call() -> int:
        with use_executor(local):
            return await process_id()

    assert asyncio.run(call()) == asyncio.run(call())


def test_loops_in_several_threads_share_the_workers(local: ProcessExecutor) -> None:
    async def calls() -> list[object]:
        with use_executor(local):
            return await asyncio.gather(*(echo(number) for number in range(30)))

    results: list[list[object]] = []
    players = [threading.Thread(target=lambda: results.append(asyncio.run(calls()))) for _ in range(3)]
    for player in players:
        player.start()
    for player in players:
        player.join(60)
    assert results == [list(range(30))] * 3


async def test_inline_runs_the_function_in_this_process() -> None:
    with use_executor(InlineExecutor()):
        assert await process_id() == os.getpid()


def test_zero_workers_mean_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_WORKERS", "0")
    assert get_worker_count() == 0
    monkeypatch.setenv("GYMSDK_WORKERS", "many")
    with pytest.raises(UsageError, match="GYMSDK_WORKERS is 'many'; set it to a number"):
        get_worker_count()


def test_the_chosen_executor_is_the_one_used(local: ProcessExecutor) -> None:
    assert get_executor() is local


class Holder:
    def method(self) -> None: ...


async def coroutine() -> None: ...


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "move it"),
        (Holder.method, "move it"),
        (coroutine, "it is `async`"),
        (numbers, "return a list"),
        (Holder, "write a `def`"),
    ],
)
def test_an_unsuitable_function_is_refused_when_decorated(function: Callable[[], object], reason: str) -> None:
    with pytest.raises(TypeError, match=f"cannot be offloaded.*{reason}"):
        offload()(function)


@pytest.mark.parametrize("limits", [{"cpu": 0.0}, {"cpu": -1.0}, {"timeout": 0.0}, {"timeout": -1.0, "cpu": 1.0}])
def test_a_limit_that_is_not_positive_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cpu and timeout must be positive"):
        offload(**limits)


def test_offload_without_parentheses_raises_with_the_correct_form():
    def grade():
        return 1

    with pytest.raises(TypeError, match=r"write `@offload\(\)` with parentheses"):
        offload(grade)
