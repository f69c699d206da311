"""Local workers: warm processes that run offloaded calls, one at a time each, and are replaced when one is lost."""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import signal
import socket
import sys
import threading
from typing import Any, NoReturn, ParamSpec, TypeVar

from gymsdk import spent
from gymsdk.deadlines import waiting
from gymsdk.errors import BudgetSpent, Failed, WorkerLost
from gymsdk.workers.calls import SIZE_BYTES, Answer, execute, framed, load, packed
from gymsdk.workers.nursery import Nursery
from gymsdk.workers.offload import Work, known
from gymsdk.workers.threads import Permits, Threads

P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 60.0
"""How long a worker may take to start and to import what it needs."""

ATTEMPTS = 3
"""How many workers are tried for a call, where they are lost before it begins."""

MOST_READ = 2**20


class _LostBefore(Exception):
    """The worker was lost before the call began, so another may take it; the message says how."""


class Slot:
    """The place of one worker: empty until a call needs it, and again once the worker is lost."""

    def __init__(self, nursery: Nursery, starters: Threads) -> None:
        self._nursery = nursery
        self._starters = starters
        self._line: socket.socket | None = None
        self._process = 0
        self._loaded: dict[str, bytes | None] = {}
        self._path: list[str] = []

    @property
    def is_empty(self) -> bool:
        """Whether the next call has to start a worker."""
        return self._line is None

    async def run(self, work: Work[..., object], code: bytes | None, arguments: bytes) -> Answer:
        """Give the worker's answer to one call; where there is none, the worker is given up."""
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                return await self._load(work, code) or await self._execute(work, arguments)
            except _LostBefore as lost:
                reason = str(lost)
                self.discard()
            except BaseException:
                self.discard()
                raise
        raise WorkerLost(f"no worker could take {work.address}: {reason}", kind="worker_start", retryable=True)

    def discard(self) -> None:
        """Give the worker up: at once for this process, and soon after it is dead."""
        process = self.disconnect()
        if process:
            threading.Thread(target=self._nursery.kill, args=(process,), name="gymsdk-end", daemon=True).start()

    def disconnect(self) -> int:
        """Close the line to the worker, and give the process it was, 0 where there was none."""
        if self._line is not None:
            self._line.close()
        process, self._process = self._process, 0
        self._line, self._loaded = None, {}
        return process

    async def _load(self, work: Work[..., object], code: bytes | None) -> Answer | None:
        if work.address in self._loaded and self._loaded[work.address] == code and self._path == sys.path:
            return None
        path = [*sys.path]
        try:
            async with asyncio.timeout(START_SECONDS):
                line = self._line or await self._start()
                answer = await _ask(line, load, work.address, code, path)
        except (OSError, EOFError) as error:  # a timeout is an OSError
            raise _LostBefore(f"it did not come to life ({error!r})") from error
        if answer[0] != "ready":
            return answer
        self._loaded[work.address], self._path = code, path
        return None

    async def _start(self) -> socket.socket:
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        modules = sorted({module for work in known() for module in work.modules})
        self._process = await self._starters.run(self._nursery.fork, theirs, modules)
        return self._line

    async def _execute(self, work: Work[..., object], arguments: bytes) -> Answer:
        assert self._line is not None
        try:
            async with asyncio.timeout(work.timeout):
                with spent.of_worker(self._process):
                    return await _ask(self._line, execute, work.address, arguments, work.cpu, work.memory)
        except TimeoutError:
            raise WorkerLost(
                f"{work.address} had not returned after {work.timeout:g} s, with processor time to spare",
                kind="worker_timeout",
                retryable=True,
            ) from None
        except ConnectionError as error:  # nobody has read the request
            raise _LostBefore("it was killed while idle") from error
        except EOFError:
            await self._mourn(work)

    async def _mourn(self, work: Work[..., object]) -> NoReturn:
        process, self._process = self._process, 0
        status = await self._starters.run(self._nursery.kill, process)
        if status == -signal.SIGPROF:
            raise BudgetSpent(f"{work.address} used up its {work.cpu:g} s of processor time", kind="cpu_spent")
        raise WorkerLost(
            f"the worker running {work.address} was killed, or left (status {status})",
            kind="worker_killed",
            retryable=True,
        )


async def _ask(line: socket.socket, *request: object) -> Answer:
    function, *arguments = request
    await asyncio.get_running_loop().sock_sendall(line, framed(pickle.dumps((function, arguments))))
    size = int.from_bytes(await _read(line, SIZE_BYTES), "big")
    answer: Answer = pickle.loads(await _read(line, size))  # noqa: S301 - our own worker wrote it
    return answer


async def _read(line: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(line, min(size - len(data), MOST_READ))
        if not part:
            raise EOFError("the worker has ended")
        data += part
    return bytes(data)


class Local:
    """The executor of at most *count* worker processes, each started by the first call that finds none idle."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._permits = Permits(self._count)
        self._nursery = Nursery()
        starters = Threads(self._count)
        self._slots = [Slot(self._nursery, starters) for _ in range(self._count)]
        self._free = list(self._slots)
        atexit.register(self.close)

    def _begin_again(self) -> None:
        for slot in self._slots:
            slot.disconnect()
        self._nursery.abandon()
        self._begin()

    async def run(self, work: Work[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Give what the function returns, computed in a worker."""
        if self._process != os.getpid():
            self._begin_again()
        arguments = _sent((args, kwargs), work)
        code = None if work.importable else _sent(work.function, work)
        with waiting():
            answer = await self._answer(work, code, arguments)
        return _result(answer, work)

    async def _answer(self, work: Work[..., object], code: bytes | None, arguments: bytes) -> Answer:
        permits, free = self._permits, self._free
        await permits.acquire()
        slot = free.pop()
        try:
            answer = await slot.run(work, code, arguments)
            if answer[0] == "memory":
                slot.discard()  # what is left of its heap is not worth keeping
            return answer
        finally:
            free.insert(0 if slot.is_empty else len(free), slot)  # taken from the end, so a worker before a start
            permits.release()

    def close(self) -> None:
        """End the workers; a later call starts them anew."""
        if self._process == os.getpid():
            self._nursery.close([slot.disconnect() for slot in self._slots])


def _sent(content: object, work: Work[..., object]) -> bytes:
    try:
        return packed(content)
    except Exception as error:
        message = f"{work.address} uses something that cannot be sent to a worker ({error}); pass it plain data"
        raise Failed(message, kind="offload") from error


def _result(answer: Answer, work: Work[P, R]) -> R:
    word, body = answer
    if word == "memory":
        raise BudgetSpent(f"{work.address} used up its {work.memory >> 20} MiB of memory", kind="memory_spent")
    if word == "value":
        value: R = _received(body, work)
        return value
    if word == "error":
        error, text = _received(body, work)
        error.add_note(f"In the worker:\n{text}")
        raise error
    raise Failed(f"{work.address} {_received(body, work)}", kind="offload")


def _received(body: bytes, work: Work[..., object]) -> Any:
    try:
        return pickle.loads(body)  # noqa: S301 - our own worker wrote it
    except Exception as error:
        raise Failed(f"{work.address} sent something this process cannot read ({error})", kind="offload") from error
