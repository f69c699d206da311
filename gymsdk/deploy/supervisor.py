"""Run each server in its own process, restart a server that exits, and end all servers with the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from gymsdk.deploy import parent
from gymsdk.deploy.process_groups import ProcessGroups
from gymsdk.descriptors import ListeningSocket
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.http.backoff import Backoff
from gymsdk.observability.logging import LogRelay, read_lines
from gymsdk.servers.reports import Exit

RESTART_BACKOFF = Backoff(first=0.1, longest=10.0)
"""The delays before the supervisor restarts a process that exited."""

HEALTHY_SECONDS = 30.0
"""Seconds that a process must run for its next restart to wait only the first delay again."""

USAGE_EXIT_CODE = 2
"""The exit code for wrong arguments. A restart with the same arguments would fail in the same way."""

LAST_OUTPUT_SECONDS = 1.0
"""Seconds that the supervisor waits, after a process has ended, for the rest of its output."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process for the supervisor to run.

    Attributes:
        name: The name of the server, for log messages.
        command: The program and its arguments.
        sock: A listening socket that the process inherits under the same descriptor number. Connections wait in its
            backlog while no process accepts them. `None` if the process opens its socket itself.
        stdin_line: The configuration line, which the supervisor writes to standard input. The supervisor then keeps the
            pipe open, so that the process sees the end of its input when the supervisor ends (`deploy.parent`).
        is_restarted: Whether the supervisor restarts the process after an exit; called at each exit.
        max_start_attempts: After how many exits before it is ready the supervisor gives up; `None` means never.
    """

    name: str
    command: Sequence[str]
    sock: socket.socket | None = None
    stdin_line: bytes = b""
    is_restarted: Callable[[], bool] = lambda: True
    max_start_attempts: int | None = None


class _StartFailed(Exception):
    """The system cannot start a process: no memory, no free process number, or no such program."""


class Supervisor:
    """Runs processes and restarts a process that exits.

    All processes end with this one, however it ends.

    Args:
        specs: The processes to run.
        seconds: The time that a process gets to end after SIGTERM, before it is killed.
        last: The name of the process to end after all others have ended.
        out: Where the output of the processes goes, line by line; standard error by default.
        prefix_lines: Whether the lines of the output go without the name of their process in front.
        ended: Called after each exit of a process that is restarted.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        seconds: float = 12.0,
        last: str | None = None,
        out: TextIO | None = None,
        prefix_lines: bool = False,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.exits: dict[str, Exit] = {}
        self._specs = specs
        self._seconds = seconds
        self._last = last
        self._log_relay = LogRelay(out or sys.stderr)
        self._process_groups = ProcessGroups(seconds)
        self._last_lines: dict[str, str] = {}
        self._ready: set[str] = set()
        self._bare = prefix_lines
        self._on_exit = ended
        self._width = max((len(each.name) for each in specs), default=0)
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._ending: set[str] = set()
        self._restart_requested: set[str] = set()
        self._restarting: set[asyncio.Future[None]] = set()

    def restart(self, name: str) -> None:
        """Terminate the process *name* and start it again at once."""
        if (process := self._running.get(name)) is not None and name not in self._restart_requested:
            self._restart_requested.add(name)
            waiting = asyncio.ensure_future(self._terminate(name, process))
            self._restarting.add(waiting)
            waiting.add_done_callback(self._restarting.discard)
            waiting.add_done_callback(_log_failure(f"the restart of the server {name!r}"))

    def pid(self, name: str) -> int | None:
        """Return the process ID of *name*, or `None` while it is not running."""
        process = self._running.get(name)
        return None if process is None else process.pid

    def pids(self) -> dict[str, int]:
        """Return the process IDs of all running processes by name."""
        return {name: process.pid for name, process in self._running.items()}

    async def run(self) -> None:
        """Run the processes until cancelled; on return, no process is running.

        Raises:
            GymsdkError: A process cannot be started or restarted.
        """
        watchers: dict[asyncio.Task[None], str] = {}
        try:
            self._log_relay.start()
            await self._process_groups.start()
            watchers |= {asyncio.create_task(self._keep_running(each)): each.name for each in self._specs}
            await asyncio.wait(watchers, return_when="FIRST_EXCEPTION")
        finally:
            await asyncio.shield(asyncio.ensure_future(self._stop_all(watchers)))
            self._log_relay.close()
        wrong = [error for each in watchers if not each.cancelled() and (error := each.exception())]
        for error in wrong[1:]:
            log.error("%s", error)
        if wrong:
            raise wrong[0]

    def mark_ready(self, name: str) -> None:
        """Record that the process *name* is ready: an exit from now on does not count as a failed start."""
        self._ready.add(name)

    async def _keep_running(self, spec: ProcessSpec) -> None:
        name, attempt = spec.name, 0
        while name not in self._ending:
            began = time.monotonic()
            try:
                pid, code = await self._run_once(spec)
            except _StartFailed as error:
                if name not in self._ready:
                    raise GymsdkError(f"the server {name!r} cannot be started ({error})") from None
                how = f"cannot be started ({error})"
            else:
                if name in self._ending:
                    return
                self._record_exit(name, pid, code)
                if name in self._restart_requested:
                    self._restart_requested.discard(name)
                    continue
                self._raise_if_final(spec, code)
                how = f"ended ({describe_exit(code)})"
            attempt = 0 if time.monotonic() - began > HEALTHY_SECONDS else attempt
            delay = RESTART_BACKOFF.get_delay(attempt)
            log.warning("the server %r %s; it is started again in %.1f s", name, how, delay)
            await asyncio.sleep(delay)
            attempt += 1

    def _record_exit(self, name: str, pid: int, code: int) -> None:
        before = self.exits.get(name)
        self.exits[name] = Exit(code=code, at=time.time(), restarts=before.restarts + 1 if before else 1, pid=pid)
        self._on_exit()

    def _raise_if_final(self, spec: ProcessSpec, code: int) -> None:
        """Raise the reason why a restart would not help, if there is one."""
        name, how = spec.name, describe_exit(code)
        if not spec.is_restarted():
            raise GymsdkError(f"the server {name!r} ended ({how}); its output says why")
        if name in self._ready:
            return
        if code == USAGE_EXIT_CODE:
            raise UsageError(f"the server {name!r} cannot be served as asked; its output says why")
        if spec.max_start_attempts is not None and self.exits[name].restarts >= spec.max_start_attempts:
            last = f": {self._last_lines[name]}" if name in self._last_lines else ""
            raise GymsdkError(
                f"the server {name!r} ended {spec.max_start_attempts} times before it was ready ({how}){last}"
            )

    async def _run_once(self, spec: ProcessSpec) -> tuple[int, int]:
        """Run the process once, kill what remains of its group, and return its process ID and its exit code."""
        name = spec.name
        process, stdin, output = await _start_process(spec)
        self._running[name] = process
        self._process_groups.add(process.pid)
        relaying = asyncio.create_task(self._relay_output(name, output))
        relaying.add_done_callback(_log_failure(f"relaying the output of the server {name!r}"))
        feeding = asyncio.create_task(_feed_stdin(stdin, spec.stdin_line))
        feeding.add_done_callback(_log_failure(f"writing to the standard input of the server {name!r}"))
        try:
            return process.pid, await process.wait()
        finally:
            self._running.pop(name, None)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._process_groups.remove(process.pid)
            # A descendant outside the group may keep the pipe open: the wait for the rest of the output is bounded.
            try:
                await asyncio.wait({relaying}, timeout=LAST_OUTPUT_SECONDS)
            finally:
                relaying.cancel()
                feeding.cancel()
                await asyncio.wait({relaying, feeding})

    async def _relay_output(self, name: str, output: int) -> None:
        async for line in read_lines(output):
            if line:
                self._last_lines[name] = line
            self._log_relay.put(line if self._bare else f"{name:<{self._width}} | {line}")

    async def _stop_all(self, watchers: Mapping[asyncio.Task[None], str]) -> None:
        """End the processes, the *last* one after all others; each gets its seconds."""
        self._ending |= {each.name for each in self._specs}
        # A process that is not running waits for its restart: cancelling its task is enough.
        for watcher, name in watchers.items():
            if name not in self._running:
                watcher.cancel()
        await self._terminate_all([name for name in self._running if name != self._last])
        await self._terminate_all([name for name in self._running if name == self._last])
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers)
        await self._process_groups.stop()

    async def _terminate_all(self, names: Sequence[str]) -> None:
        waiting = {asyncio.ensure_future(self._terminate(name, self._running[name])): name for name in names}
        for each, name in waiting.items():
            each.add_done_callback(_log_failure(f"the termination of the server {name!r}"))
        if waiting:
            await asyncio.wait(waiting)

    async def _terminate(self, name: str, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._seconds):
                await process.wait()
        except TimeoutError:
            log.warning("the server %r did not end within %g s; it is killed", name, self._seconds)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def describe_exit(code: int) -> str:
    """Describe an exit code: `exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def _start_process(spec: ProcessSpec) -> tuple[asyncio.subprocess.Process, int, int]:
    """Start a process; return it, the writing end of its standard input, and the reading end of its output.

    Raises:
        _StartFailed: The system cannot start the process.
    """
    # Pipes of our own: asyncio waits until its own pipes are closed, and a descendant may keep them open.
    try:
        with ExitStack() as ours, ExitStack() as theirs:
            (heard, stdin), (output, said) = _open_pipe(theirs, ours), _open_pipe(ours, theirs)
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=heard,
                stdout=said,
                stderr=said,
                pass_fds=[spec.sock.fileno()] if spec.sock else [],
                # Its own session: Ctrl-C reaches the supervisor alone, which then ends the servers in order.
                start_new_session=True,
            )
            ours.pop_all()
    except OSError as error:
        raise _StartFailed(error.strerror or str(error)) from error
    return process, stdin, output


def _open_pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Return the two ends of a new pipe; each stack closes its end."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


async def _feed_stdin(stdin: int, line: bytes) -> None:
    """Write *handed* to the pipe *stdin*, and keep the pipe open until cancelled; see `deploy.parent`."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(stdin, "wb", 0))
    try:
        transport.write(line)
        await loop.create_future()
    finally:
        if not transport.is_closing():
            transport.abort()


def _log_failure(what: str) -> Callable[[asyncio.Future[None]], None]:
    """Return a callback that logs the exception of a future that no code awaits."""

    def log_exception(future: asyncio.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("%s failed: %s", what, error, exc_info=error)

    return log_exception


HEAD = "head_server"
"""The name of the head among the supervised processes."""

SECRET_OPTIONS = ("--set", "--pin", "--model", "--base-url")
"""Options with values that may contain a secret, for example a key in the query of a URL."""

SUPERVISOR_OPTIONS = ("--separate", "--json", "--open", "--launch-vllm")
"""Flags that only the supervisor reads."""


class SecretOptions(BaseModel):
    """The part of a command's options that reaches a server on standard input, because it may contain secrets.

    Every user of the machine can read the arguments and the environment of a process.

    Attributes:
        overrides: Overrides of the configuration files.
        settings: Settings of environments.
        model: The name or URL of the policy's model.
        pins: Sampling parameters that apply to every request.
        base_urls: Where the model is served.
        key: The key of the model's API.
        supervisor: The ID by which the servers of one supervisor recognise each other.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    overrides: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    model: str | None = None
    pins: tuple[str, ...] = ()
    base_urls: tuple[str, ...] = ()
    key: str | None = None
    supervisor: str = ""

    def to_line(self) -> bytes:
        """Return the line for the standard input of a server."""
        return self.model_dump_json().encode() + b"\n"


def read_secret_options(file: int) -> SecretOptions:
    """Read the options that the supervisor passes on standard input, beside the listening socket *file*.

    Raises:
        UsageError: No listening socket is open under the number *file*.
        GymsdkError: Standard input does not hold the options.
    """
    open_socket(file).detach()
    try:
        return SecretOptions.model_validate_json(parent.read_config_line())
    except ValidationError:
        raise GymsdkError(
            "the configuration on this server's standard input is invalid; only --separate may pass --only and --fd"
        ) from None


def build_child_arguments(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the arguments for one server of a command: *words* without *overrides* and without secret options.

    The flags that only the supervisor reads are left out as well.
    """
    kept = list(words[: words.index("--")] if "--" in words else words)
    for option in (*SECRET_OPTIONS, "--head", "--port"):
        kept = _drop_option(kept, option)
    pairs = zip(["", *kept], kept, strict=False)
    return [
        word
        for before, word in pairs
        if word not in SUPERVISOR_OPTIONS and (word not in overrides or before == "--server-port")
    ]


def open_socket(file: int) -> socket.socket:
    """Return the listening socket under the descriptor *file*; raises `UsageError` if there is none."""
    try:
        at = socket.socket(fileno=file)
        if at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # A child of this server must not inherit the socket: it would keep the port in use.
            os.set_inheritable(file, False)
            return ListeningSocket.from_socket(at)
        at.detach()
    except OSError:
        pass
    raise UsageError(f"--fd {file}: no listening socket is open under this number; only --separate may pass --fd")


def _drop_option(words: list[str], option: str) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
