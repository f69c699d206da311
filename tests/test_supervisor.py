"""Supervise real processes: each process serves on its inherited socket, also after kills and restarts."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gymsdk.deploy.supervisor import ProcessSpec, Supervisor, _log_failure, describe_exit
from gymsdk.errors import GymsdkError, UsageError

SERVER = """
import os, socket, sys
from gymsdk.deploy import parent
parent.watch_parent()
print("up", flush=True)
at = socket.socket(fileno=int(sys.argv[1]))
while True:
    here, _ = at.accept()
    here.sendall(str(os.getpid()).encode())
    here.close()
"""
"""A server that sends its process id on every connection."""


def build_spec(name: str, source: str = SERVER) -> ProcessSpec:
    at = socket.create_server(("127.0.0.1", 0))
    return ProcessSpec(name, [sys.executable, "-c", source, str(at.fileno())], at)


@asynccontextmanager
async def supervised(*specs: ProcessSpec, seconds: float = 5.0) -> AsyncIterator[tuple[Supervisor, io.StringIO]]:
    out = io.StringIO()
    supervisor = Supervisor(specs, seconds=seconds, last=specs[0].name, out=out)
    running = asyncio.ensure_future(supervisor.run())
    try:
        yield supervisor, out
    finally:
        running.cancel()
        await asyncio.wait({running})
        for each in specs:
            each.sock.close()
    assert running.cancelled() or running.exception() is not None


async def request_pid(one: ProcessSpec) -> int:
    """Return the process id from the socket of a supervised process, with retries until the process is ready."""
    async with asyncio.timeout(20):
        # A process that is killed closes its accepted connections without a response.
        while not (pid := await _read_pid(one)):
            pass
    return int(pid)


async def _read_pid(one: ProcessSpec) -> bytes:
    reader, writer = await asyncio.open_connection(*one.sock.getsockname())
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_a_killed_process_restarts_and_requests_meanwhile_are_served() -> None:
    one, other = build_spec("one"), build_spec("other")
    async with supervised(one, other) as (supervisor, _):
        first, beside = await request_pid(one), await request_pid(other)
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: is_gone(first))
        assert await request_pid(one) != first
        assert await request_pid(other) == beside
        assert (supervisor.exits["one"].code, supervisor.exits["one"].restarts) == (-9, 1)
        assert "other" not in supervisor.exits


async def test_exit_leaves_no_processes() -> None:
    specs = [build_spec(f"server{number}") for number in range(3)]
    async with supervised(*specs):
        pids = [await request_pid(each) for each in specs]
    assert all(is_gone(pid) for pid in pids)


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    stubborn = build_spec("stubborn", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER)
    async with supervised(stubborn, seconds=0.5):
        pid = await request_pid(stubborn)
    assert is_gone(pid)


async def test_output_lines_have_the_name_of_their_process() -> None:
    one = build_spec("one")
    async with supervised(one) as (_, out):
        await request_pid(one)
        await wait_until(out.getvalue)
    assert out.getvalue().splitlines() == ["one | up"]


async def test_a_very_long_line_is_relayed() -> None:
    talker = build_spec("talker", "print('x' * 3_000_000, flush=True)\n" + SERVER)
    async with supervised(talker) as (_, out):
        await request_pid(talker)
        await wait_until(lambda: "up" in out.getvalue())
    assert out.getvalue().count("x") == 3_000_000


async def test_a_process_with_a_usage_error_is_not_restarted() -> None:
    wrong = build_spec("wrong", "import sys; print('no such thing', flush=True); sys.exit(2)")
    out = io.StringIO()
    with pytest.raises(UsageError, match="'wrong'"):
        async with asyncio.timeout(20):
            await Supervisor([wrong], out=out).run()
    wrong.sock.close()
    assert "no such thing" in out.getvalue()


async def test_a_process_with_a_surviving_child_is_restarted() -> None:
    leaving = (
        "import subprocess\nsleeper = subprocess.Popen(['sleep', '300'])\nprint('sleeper', sleeper.pid, flush=True)\n"
    )
    one = build_spec("one", leaving + SERVER)
    async with supervised(one) as (_, out):
        first = await request_pid(one)
        os.kill(first, signal.SIGKILL)
        assert await request_pid(one) != first
        await wait_until(lambda: out.getvalue().count("sleeper") == 2)
        sleepers = [int(line.split()[-1]) for line in out.getvalue().splitlines() if "sleeper" in line]
        await wait_until(lambda: is_gone(sleepers[0]))
    # The signalled process is not our child, so wait until the system has removed it.
    await wait_until(lambda: is_gone(sleepers[1]))


async def test_a_process_that_was_ready_is_restarted_with_any_exit_code() -> None:
    one = build_spec("one", SERVER.replace("    here.close()", "    here.close()\n    os._exit(2)"))
    async with supervised(one) as (supervisor, _):
        supervisor.mark_ready("one")
        first = await request_pid(one)
        assert await request_pid(one) != first


async def test_a_process_that_never_starts_is_reported_with_its_last_output() -> None:
    broken = build_spec("broken", "import sys; print('no such thing', flush=True); sys.exit(1)")
    limited = ProcessSpec(broken.name, broken.command, broken.sock, max_start_attempts=2)
    with pytest.raises(GymsdkError, match=r"'broken' ended 2 times before it was ready \(exit code 1\): no such thing"):
        async with asyncio.timeout(20):
            await Supervisor([limited], out=io.StringIO()).run()
    broken.sock.close()


async def test_a_full_output_pipe_does_not_block_the_stop() -> None:
    read, write = os.pipe()
    talker = build_spec("talker", "print('x' * 3_000_000, flush=True)\n" + SERVER)
    with os.fdopen(write, "w") as out:
        running = asyncio.ensure_future(Supervisor([talker], out=out).run())
        assert await request_pid(talker)
        running.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait({running})
        # Release the writer.
        os.close(read)
    talker.sock.close()


async def kill_supervisor(tmp_path: Path, source: str, seconds: float = 12.0) -> tuple[int, list[int]]:
    """Kill a supervisor; return the process that it supervised and the descendants of this process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, socket, sys\n"
        "from gymsdk.deploy.supervisor import ProcessSpec, Supervisor\n"
        f"source = {source!r}\n"
        "at = socket.create_server(('127.0.0.1', 0))\n"
        "print(at.getsockname()[1], flush=True)\n"
        "one = ProcessSpec('one', [sys.executable, '-c', source, str(at.fileno())], at)\n"
        f"asyncio.run(Supervisor([one], seconds={seconds}).run())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    pid = int(await reader.read())
    writer.close()
    started = children(process.pid)
    process.kill()
    await process.communicate()
    return pid, started


async def test_processes_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    pid, started = await kill_supervisor(tmp_path, SERVER)
    assert pid in started
    await wait_until(lambda: all(map(is_gone, started)))


HOLDING = SERVER.replace("    here.close()", "    here.close()\n    re.match(r'(a+)+$', 'a' * 60 + 'b')")
HOLDING = HOLDING.replace("import os", "import re, os")
"""A server that blocks all its threads after the first request."""


async def test_a_blocked_process_ends_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    sleeper = "import subprocess\nsubprocess.Popen(['sleep', '300'])\n"
    pid, started = await kill_supervisor(tmp_path, sleeper + HOLDING, seconds=0.5)
    assert pid in started
    await wait_until(lambda: all(map(is_gone, started)))
    assert list_group(pid) == []


async def test_orphaned_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    sleeper = "import subprocess\nsubprocess.Popen(['sleep', '300'])\n"
    pid, _ = await kill_supervisor(tmp_path, sleeper + SERVER)
    await wait_until(lambda: list_group(pid) == [])


def list_group(group: int) -> list[int]:
    """Return the running processes of a process group."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        pid = int(each.name)
        try:
            if os.getpgid(pid) == group and not is_gone(pid):
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


async def test_supervision_continues_when_the_orphan_reaper_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    one = build_spec("one")
    async with supervised(one):
        first = await request_pid(one)
        (reaper,) = reapers()
        os.kill(reaper, signal.SIGKILL)
        await wait_until(lambda: is_gone(reaper))
        os.kill(first, signal.SIGKILL)
        assert await request_pid(one) != first
    assert "kills orphaned servers has ended" in caplog.text


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def reapers() -> list[int]:
    return [each for each in children(os.getpid()) if b"orphan_reaper.py" in Path(f"/proc/{each}/cmdline").read_bytes()]


async def test_exit_succeeds_although_a_forked_process_holds_all_descriptors(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os, sys, time\n"
        "from gymsdk.deploy.supervisor import ProcessSpec, Supervisor\n"
        "async def main():\n"
        "    supervisor = Supervisor([ProcessSpec('one', ['sleep', '300'])])\n"
        "    running, ours = asyncio.ensure_future(supervisor.run()), os.getpid()\n"
        "    while not supervisor.pids():\n"
        "        await asyncio.sleep(0.02)\n"
        "    if os.fork() == 0:\n"
        "        while os.getppid() == ours:\n"
        "            time.sleep(0.02)\n"
        "        os._exit(0)\n"
        "    running.cancel()\n"
        "    await asyncio.wait({running})\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_stopping_the_orphan_reaper_does_not_lose_its_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(8):
        running = asyncio.ensure_future(Supervisor([ProcessSpec("one", ["sleep", "300"])]).run())
        await wait_until(reapers)
        running.cancel()
        await asyncio.wait({running})
    assert [message for message in caplog.messages if "Unknown child" in message] == []


def open_resources() -> list[str]:
    """Return the open descriptors of this process and its writer threads."""
    opened = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sorted(opened) + [each.name for each in threading.enumerate() if each.name == "gymsdk-log-relay"]


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_start_leaves_nothing(steps: int) -> None:
    one = build_spec("one")
    before = open_resources()
    running = asyncio.ensure_future(Supervisor([one], out=io.StringIO()).run())
    for _ in range(steps):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    await wait_until(lambda: open_resources() == before)
    assert not reapers()
    one.sock.close()


async def test_running_out_of_descriptors_at_start_is_reported() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(GymsdkError, match=r"no process can be started here \(Too many open files\)"):
            await Supervisor([ProcessSpec("one", ["true"])], out=io.StringIO()).run()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_stop_during_the_last_output_of_a_process_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymsdk.deploy.supervisor.LAST_OUTPUT_SECONDS", 600.0)
    leaving = (
        "import subprocess\n"
        "sleeper = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print('sleeper', sleeper.pid, flush=True)\n"
    )
    before, tasks = open_resources(), asyncio.all_tasks()
    one = build_spec("one", leaving + SERVER)
    async with supervised(one) as (supervisor, out):
        os.kill(await request_pid(one), signal.SIGKILL)
        await wait_until(lambda: "sleeper" in out.getvalue() and not supervisor.pids())
    try:
        await wait_until(lambda: asyncio.all_tasks() == tasks)
        await wait_until(lambda: open_resources() == before)
    finally:
        os.kill(int(out.getvalue().splitlines()[0].split()[-1]), signal.SIGKILL)


TELLING = (
    """
import sys
from gymsdk.deploy import parent
line = parent.read_config_line()
print(len(line), line[-10:], flush=True)
"""
    + SERVER
)
"""A server that reads its configuration line before it watches its parent process."""


async def test_each_restart_receives_the_same_configuration_of_any_size() -> None:
    spec = build_spec("told", TELLING)
    handed = b"x" * 3_000_000 + b" the end\n"
    one = ProcessSpec(spec.name, spec.command, spec.sock, handed)
    async with supervised(one) as (_, out):
        os.kill(await request_pid(one), signal.SIGKILL)
        await wait_until(lambda: out.getvalue().count("up") == 2)
    assert [line for line in out.getvalue().splitlines() if "end" in line] == [
        f"told | {len(handed)} {handed[-10:]!r}"
    ] * 2


async def test_a_program_that_cannot_be_executed_is_reported() -> None:
    for words in (["/no/such/program"], [sys.executable, "-c", "x" * 3_000_000]):
        with pytest.raises(GymsdkError, match=r"the server 'one' cannot be started \((No such file|Argument list too)"):
            await Supervisor([ProcessSpec("one", words)], out=io.StringIO()).run()


async def test_a_failed_restart_is_retried_until_it_succeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    python, away = tmp_path / "python", tmp_path / "away"
    # A copied script instead of a symbolic link: a linked interpreter would not find its packages.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    other = build_spec("one")
    one = ProcessSpec(other.name, [str(python), *other.command[1:]], other.sock)
    async with supervised(one) as (supervisor, _):
        first = await request_pid(one)
        supervisor.mark_ready("one")
        python.rename(away)
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: "cannot be started" in caplog.text)
        away.rename(python)
        assert await request_pid(one) != first


async def test_errors_in_background_tasks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def passed_on() -> None:
        raise LookupError("no place for that")

    passing = asyncio.create_task(passed_on())
    passing.add_done_callback(_log_failure("what the server 'one' writes"))
    await wait_until(lambda: caplog.messages)
    assert caplog.messages == ["what the server 'one' writes failed: no place for that"]


async def test_requested_exits_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    specs = [build_spec("one"), build_spec("other")]
    with caplog.at_level(logging.INFO):
        async with supervised(*specs):
            for each in specs:
                await request_pid(each)
    assert caplog.messages == []


async def test_of_two_simultaneous_errors_one_is_raised_and_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    wrong = [ProcessSpec(name, ["/no/such/program"]) for name in ("one", "other")]
    with pytest.raises(GymsdkError, match="'one'"):
        await Supervisor(wrong, out=io.StringIO()).run()
    assert caplog.messages == ["the server 'other' cannot be started (No such file or directory)"]


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")]
)
def test_an_exit_code_is_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
