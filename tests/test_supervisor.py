"""A supervisor and real processes: each answers at the socket it was handed, however often it is killed."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gymsdk.errors import GymsdkError, UsageError
from gymsdk.supervisor import Charge, Supervisor, told

SERVER = """
import os, socket, sys
from gymsdk import lifeline
lifeline.held()
print("up", flush=True)
at = socket.socket(fileno=int(sys.argv[1]))
while True:
    here, _ = at.accept()
    here.sendall(str(os.getpid()).encode())
    here.close()
"""
"""A server that answers every connection with its process id."""


def charge(name: str, source: str = SERVER) -> Charge:
    at = socket.create_server(("127.0.0.1", 0))
    return Charge(name, [sys.executable, "-c", source, str(at.fileno())], at)


@asynccontextmanager
async def supervised(*charges: Charge, seconds: float = 5.0) -> AsyncIterator[tuple[Supervisor, io.StringIO]]:
    out = io.StringIO()
    supervisor = Supervisor(charges, seconds=seconds, last=charges[0].name, out=out)
    running = asyncio.ensure_future(supervisor.run())
    try:
        yield supervisor, out
    finally:
        running.cancel()
        await asyncio.wait({running})
        for each in charges:
            each.at.close()
    assert running.cancelled() or running.exception() is not None


async def answered(one: Charge) -> int:
    """The process that answers at the socket of a charge, however long it takes to be there."""
    async with asyncio.timeout(20):
        # Whom a process took in that is being killed, it leaves without an answer.
        while not (said := await _said(one)):
            pass
    return int(said)


async def _said(one: Charge) -> bytes:
    reader, writer = await asyncio.open_connection(*one.at.getsockname())
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - processes tell of nothing
            await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_a_killed_process_is_started_again_and_who_asks_meanwhile_is_answered() -> None:
    one, other = charge("one"), charge("other")
    async with supervised(one, other) as (supervisor, _):
        first, beside = await answered(one), await answered(other)
        os.kill(first, signal.SIGKILL)
        await until(lambda: is_gone(first))
        assert await answered(one) != first
        assert await answered(other) == beside
        assert (supervisor.exits["one"].code, supervisor.exits["one"].restarts) == (-9, 1)
        assert "other" not in supervisor.exits


async def test_nothing_is_left_when_it_ends() -> None:
    charges = [charge(f"server{number}") for number in range(3)]
    async with supervised(*charges):
        pids = [await answered(each) for each in charges]
    assert all(is_gone(pid) for pid in pids)


async def test_one_that_does_not_end_is_killed() -> None:
    stubborn = charge("stubborn", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER)
    async with supervised(stubborn, seconds=0.5):
        pid = await answered(stubborn)
    assert is_gone(pid)


async def test_its_output_says_who_wrote_it() -> None:
    one = charge("one")
    async with supervised(one) as (_, out):
        await answered(one)
        await until(out.getvalue)
    assert out.getvalue().splitlines() == ["one | up"]


async def test_a_very_long_line_is_passed_on() -> None:
    talker = charge("talker", "print('x' * 3_000_000, flush=True)\n" + SERVER)
    async with supervised(talker) as (_, out):
        await answered(talker)
        await until(lambda: "up" in out.getvalue())
    assert out.getvalue().count("x") == 3_000_000


async def test_one_that_is_asked_for_wrongly_is_not_started_again() -> None:
    wrong = charge("wrong", "import sys; print('no such thing', flush=True); sys.exit(2)")
    out = io.StringIO()
    with pytest.raises(UsageError, match="'wrong'"):
        async with asyncio.timeout(20):
            await Supervisor([wrong], out=out).run()
    wrong.at.close()
    assert "no such thing" in out.getvalue()


async def test_one_whose_child_outlives_it_is_started_again_all_the_same() -> None:
    leaving = (
        "import subprocess\nsleeper = subprocess.Popen(['sleep', '300'])\nprint('sleeper', sleeper.pid, flush=True)\n"
    )
    one = charge("one", leaving + SERVER)
    async with supervised(one) as (_, out):
        first = await answered(one)
        os.kill(first, signal.SIGKILL)
        assert await answered(one) != first
        await until(lambda: out.getvalue().count("sleeper") == 2)
        sleepers = [int(line.split()[-1]) for line in out.getvalue().splitlines() if "sleeper" in line]
        await until(lambda: is_gone(sleepers[0]))
    # A process that was told to end, and is no child of ours, is gone once the system has come to it.
    await until(lambda: is_gone(sleepers[1]))


async def test_an_exit_code_means_nothing_once_a_process_was_ready() -> None:
    one = charge("one", SERVER.replace("    here.close()", "    here.close()\n    os._exit(2)"))
    async with supervised(one) as (supervisor, _):
        supervisor.ready("one")
        first = await answered(one)
        assert await answered(one) != first


async def test_one_that_never_begins_is_given_up_with_its_last_words() -> None:
    broken = charge("broken", "import sys; print('no such thing', flush=True); sys.exit(1)")
    limited = Charge(broken.name, broken.words, broken.at, tries=2)
    with pytest.raises(GymsdkError, match=r"'broken' ended 2 times as it began \(exit code 1\): no such thing"):
        async with asyncio.timeout(20):
            await Supervisor([limited], out=io.StringIO()).run()
    broken.at.close()


async def test_nobody_waits_for_who_does_not_read() -> None:
    read, write = os.pipe()
    talker = charge("talker", "print('x' * 3_000_000, flush=True)\n" + SERVER)
    with os.fdopen(write, "w") as out:
        running = asyncio.ensure_future(Supervisor([talker], out=out).run())
        assert await answered(talker)
        running.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait({running})
        # Whoever writes is let go.
        os.close(read)
    talker.at.close()


async def test_processes_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, socket, sys\n"
        "from gymsdk.supervisor import Charge, Supervisor\n"
        f"source = {SERVER!r}\n"
        "at = socket.create_server(('127.0.0.1', 0))\n"
        "print(at.getsockname()[1], flush=True)\n"
        "asyncio.run(Supervisor([Charge('one', [sys.executable, '-c', source, str(at.fileno())], at)]).run())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    pid = int(await reader.read())
    writer.close()
    process.kill()
    await process.wait()
    await until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")]
)
def test_an_exit_code_is_told_in_words(code: int, words: str) -> None:
    assert told(code) == words
