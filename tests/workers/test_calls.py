from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymsdk import offload
from gymsdk.errors import Failed, Unscorable
from gymsdk.workers.offload import use_executor
from gymsdk.workers.processes import ProcessExecutor


class Unreadable(Exception):
    """An exception that does not survive a pipe."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.held = threading.Lock()


@offload()
def echo(value: object, *, twice: bool = False) -> object:
    return [value, value] if twice else value


@offload()
def process_id() -> int:
    return os.getpid()


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


@pytest.fixture(scope="module")
def local() -> Iterator[ProcessExecutor]:
    workers = ProcessExecutor(1)
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def chosen(local: ProcessExecutor) -> Iterator[ProcessExecutor]:
    with use_executor(local):
        yield local


@pytest.mark.slow
async def test_an_exception_is_raised_as_itself_with_the_workers_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        await divide(1)
    assert "in divide" in raised.value.__notes__[0]


@pytest.mark.slow
async def test_an_exception_keeps_what_it_carries() -> None:
    with pytest.raises(Failed, match="gold answer") as failed:
        await fail("failed")
    assert failed.value.kind == "gold"
    with pytest.raises(Unscorable, match="no verdict") as unscorable:
        await fail("unscorable")
    assert (unscorable.value.kind, unscorable.value.retryable) == ("gold", True)
    with pytest.raises(FileNotFoundError) as missing:
        await fail("missing")
    assert missing.value.filename == "gold.json"


@pytest.mark.slow
async def test_an_exception_that_cannot_be_pickled_is_described() -> None:
    with pytest.raises(Failed, match=r"(?s)fail raised an exception that cannot be pickled.*Unreadable: locked"):
        await fail("unreadable")


@pytest.mark.parametrize(("kind", "name"), [("exit", "SystemExit"), ("cancelled", "CancelledError")])
async def test_an_exit_in_a_worker_fails_the_call(kind: str, name: str) -> None:
    with pytest.raises(Failed, match=f"fail ended with {name}"):
        await fail(kind)


async def test_stop_iteration_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await fail("stop")


async def test_a_value_that_cannot_be_pickled_is_described() -> None:
    with pytest.raises(Failed, match="generator returned a generator, which cannot be pickled"):
        await generator()


async def test_an_argument_that_cannot_be_pickled_is_described() -> None:
    with pytest.raises(Failed, match=r"echo uses an object that cannot be sent to a worker .*lock"):
        await echo(threading.Lock())


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
