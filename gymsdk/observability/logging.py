"""Logging of server processes: one line per record, with the server, rollout and request that the record belongs to.

Request lines never contain prompts, responses, keys or tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict

from gymsdk import context, jsonl
from gymsdk.context import LogContext
from gymsdk.errors import UsageError
from gymsdk.profiling import get_file_stem

MAX_QUEUED_LINES = 10_000
"""Lines that may wait to be written; further lines are dropped and counted."""

FLUSH_SECONDS = 2.0
"""Seconds that the end of the process waits for lines to be written."""


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LogFormat: TypeAlias = Literal["text", "json"]

LOGGER_NAME, REQUEST_LOGGER_NAME = "gymsdk", "gymsdk.requests"
"""The logger of gymsdk's messages, and the logger that writes one line for each request."""

SERVER_ERROR_LOGGER_NAME = "uvicorn.error"
"""uvicorn's logger, which reports unexpected exceptions with their tracebacks."""

STDERR = 2

NO_CONTEXT = LogContext()

MAX_RELAYED_LINES = 10_000
"""Lines that may wait to be written; further lines are dropped and counted."""

CLOSE_SECONDS = 1.0
"""Seconds that `close` waits for the remaining lines."""

MAX_LINE_BYTES = 2**20
"""Longest line in bytes that is read in one piece."""


class LogWriter:
    """Writes lines to file descriptors in a background thread, so that a slow reader does not block the process.

    Args:
        lost: Builds the line that reports dropped lines.
        max_lines: How many lines may wait.
    """

    def __init__(self, lost: Callable[[int], bytes], max_lines: int = MAX_QUEUED_LINES) -> None:
        self._lost = lost
        self._max_lines = max_lines
        self._thread: threading.Thread | None = None
        self._reset()

    def put(self, file: int, line: bytes) -> None:
        """Queue a line for a file descriptor, or drop and count it if too many lines wait."""
        if self._process != os.getpid():
            # After a fork, the thread and its queue belong to the parent process.
            self._reset()
        with self._change:
            if len(self._waiting) >= self._max_lines:
                self._dropped += 1
                return
            self._waiting.append((file, line))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gymsdk-logs", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all lines are written, at most `seconds`; return whether they are."""
        if self._process != os.getpid():
            return True
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._writing, seconds)

    def _reset(self) -> None:
        self._process = os.getpid()
        self._change = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._writing = False
        self._dropped = 0
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._change:
                self._writing = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting)
                file, line = self._waiting.popleft()
                dropped, self._dropped, self._writing = self._dropped, 0, True
            _write_line(file, line)
            if dropped:
                _write_line(file, self._lost(dropped))


def _write_line(file: int, line: bytes) -> None:
    try:
        while line:
            line = line[os.write(file, line) :]
    except OSError:
        # The reader is gone or the disk is full, and there is no other place to report it.
        return


class LogConfig(BaseModel):
    """The logging options of a process.

    Attributes:
        level: The lowest level that is logged.
        format: The format of a line.
        directory: Where each server gets a log file; standard error if `None`.
        server: The server named in lines that belong to no request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: LogLevel = "warning"
    format: LogFormat = "text"
    directory: Path | None = None
    server: str = "gymsdk"

    @property
    def takes_stderr(self) -> bool:
        """Whether standard error gets log lines in this format instead of plain warnings."""
        return self.directory is None and (self.level, self.format) != ("warning", "text")

    @property
    def cli_options(self) -> list[str]:
        """The command line options that configure another process in the same way."""
        folder = [] if self.directory is None else ["--log-dir", str(self.directory)]
        return ["--log-level", self.level, "--log-format", self.format, *folder]


def parse_log_config(level: str, format: str, directory: Path | None = None, *, server: str = "gymsdk") -> LogConfig:
    """Validate the logging options of the command line.

    Args:
        level: The lowest level that is logged.
        format: `text` or `json`.
        directory: The directory of log files.
        server: The server named in lines that belong to no request.

    Raises:
        UsageError: The level or the format is unknown.
    """
    for option, value, choices in (("level", level, get_args(LogLevel)), ("format", format, get_args(LogFormat))):
        if value not in choices:
            raise UsageError(f"--log-{option} {value}: must be one of {', '.join(choices)}")
    return LogConfig.model_validate({"level": level, "format": format, "directory": directory, "server": server})


@contextmanager
def log_to(config: LogConfig) -> Iterator[None]:
    """Configure logging inside the block.

    Raises:
        UsageError: The log directory is not writable.
    """
    handler = configure(config)
    try:
        yield
    finally:
        if handler is not None:
            _remove_handler(handler)


def configure(config: LogConfig) -> LogHandler | None:
    """Configure logging; return the handler, or `None` if the options are the default.

    Raises:
        UsageError: The log directory is not writable.
    """
    if not config.takes_stderr and config.directory is None:
        return None
    handler = LogHandler(config)
    for name in (LOGGER_NAME, REQUEST_LOGGER_NAME):
        logging.getLogger(name).setLevel(config.level.upper())
        logging.getLogger(name).addHandler(handler)
    # Other handlers of gymsdk's logger, such as the console's, show no request lines.
    logging.getLogger(REQUEST_LOGGER_NAME).propagate = False
    logging.getLogger(SERVER_ERROR_LOGGER_NAME).addHandler(handler)
    return handler


def _remove_handler(handler: LogHandler) -> None:
    for name in (LOGGER_NAME, REQUEST_LOGGER_NAME, SERVER_ERROR_LOGGER_NAME):
        logging.getLogger(name).removeHandler(handler)
    logging.getLogger(LOGGER_NAME).setLevel(logging.NOTSET)
    logging.getLogger(REQUEST_LOGGER_NAME).setLevel(logging.CRITICAL)
    logging.getLogger(REQUEST_LOGGER_NAME).propagate = True
    handler.close()


class LogHandler(logging.Handler):
    """Writes records to the log file of their server, or to standard error."""

    def __init__(self, config: LogConfig) -> None:
        super().__init__(config.level.upper())
        self._config = config
        self._files: dict[str, int] = {}
        self._writer = LogWriter(self._format_dropped)
        if config.directory is not None:
            _check_directory(config.directory, config.server)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of one record."""
        try:
            record_context = context.get_log_context() or NO_CONTEXT
            server = record_context.server or self._config.server
            line = (
                _format_json(record, record_context, server)
                if self._config.format == "json"
                else _format_text(record, record_context, server)
            )
            directory = self._config.directory
            self._writer.put(STDERR if directory is None else self._open_file(directory, server), line + b"\n")
        except Exception:  # noqa: BLE001  # logging must never raise into the code that logs
            self.handleError(record)

    def flush(self) -> None:
        """Wait a bounded time until all lines are written."""
        self._writer.flush()

    def close(self) -> None:
        """Close the log files."""
        # Keep descriptors open that the writer thread may still use: their numbers could be reused.
        done = self._writer.flush()
        while done and self._files:
            os.close(self._files.popitem()[1])
        super().close()

    def _format_dropped(self, number: int) -> bytes:
        sentence = f"{number} lines were dropped because they could not be written in time"
        record = logging.LogRecord(LOGGER_NAME, logging.WARNING, "", 0, sentence, None, None)
        format_record = _format_json if self._config.format == "json" else _format_text
        return format_record(record, NO_CONTEXT, self._config.server) + b"\n"

    def _open_file(self, directory: Path, server: str) -> int:
        if server not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files[server] = os.open(_log_path(directory, server), flags, 0o644)
        return self._files[server]


def _log_path(directory: Path, server: str) -> Path:
    return directory / f"{get_file_stem(server)}.log"


def _check_directory(directory: Path, server: str) -> None:
    """Create the log directory and check that it is writable."""
    # Check now rather than at the first record, so that the user sees the error.
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        if (file := _log_path(directory, server)).exists():
            file.open("ab").close()
    except OSError as error:
        sentence = f"--log-dir {directory} is not writable ({error.strerror or error})"
        raise UsageError(f"{sentence}; choose a directory that this user can write") from None


def _format_json(record: logging.LogRecord, record_context: LogContext, server: str) -> bytes:
    fields: dict[str, Any] = getattr(record, "fields", {})
    line = {
        "time": _format_time(record),
        "level": record.levelname.lower(),
        "server": server,
        "rollout_id": record_context.rollout or None,
        "request_id": record_context.request or None,
        "message": record.getMessage(),
        "fields": fields | _summarize_exception(record),
    }
    return jsonl.dump_json(line, default=str)


def _format_text(record: logging.LogRecord, record_context: LogContext, server: str) -> bytes:
    prefix = f"{server} rollout={record_context.rollout or '-'} request={record_context.request or '-'}"
    message = " ".join([record.getMessage(), *_summarize_exception(record).values()])
    # One line per record, so that a search for a rollout finds complete records.
    escaped = message.replace("\\", r"\\").replace("\r", r"\r").replace("\n", r"\n")
    return f"{_format_time(record)} {record.levelname.lower()} {prefix} {escaped}".encode(errors="backslashreplace")


def _format_time(record: logging.LogRecord) -> str:
    return f"{_format_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _format_second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _summarize_exception(record: logging.LogRecord) -> dict[str, str]:
    """Return the stack and type of an exception without its message, which may quote a model."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return {}
    return {"traceback": "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__}


class LogRelay:
    """Relays lines of child processes to a text stream in a background thread.

    Args:
        out: The stream.
        max_lines: How many lines may wait.
    """

    def __init__(self, out: TextIO, *, max_lines: int = MAX_RELAYED_LINES) -> None:
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._lost = 0
        self._writing = threading.Thread(target=self._write, name="gymsdk-log-relay", daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._writing.start()

    def put(self, line: str) -> None:
        """Queue a line, or drop it if too many lines wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write the remaining lines, within a bounded time."""
        if self._writing.ident is None:
            return
        try:
            self._lines.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._writing.join(CLOSE_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            notice = f"({lost} lines were dropped because they were not read in time)\n" if lost else ""
            try:
                self._out.write(f"{notice}{line}\n")
                self._out.flush()
            except (OSError, ValueError):
                # The reader is gone.
                return


async def read_lines(pipe: int) -> AsyncIterator[str]:
    """Yield the lines of a pipe, and close it at the end; lines over `MAX_LINE_BYTES` come in pieces."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
    )
    try:
        partial = b""
        while chunk := await reader.read(MAX_LINE_BYTES):
            *complete, partial = (partial + chunk).split(b"\n")
            if len(partial) > MAX_LINE_BYTES:
                complete, partial = [*complete, partial], b""
            for line in complete:
                yield _decode_line(line)
        if partial:
            yield _decode_line(partial)
    finally:
        transport.close()


def _decode_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
