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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

from gymsdk import jsonl, tracing
from gymsdk.config.model import LogConfig
from gymsdk.errors import UsageError
from gymsdk.tracing import LogContext, get_file_stem

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

MAX_LINE_BYTES = 2**20
"""Longest line in bytes that is read in one piece."""


class BackgroundHandler(QueueHandler):
    """Passes records to another handler in a background thread, so that a slow reader does not block the process.

    Args:
        target: The other handler.
        max_lines: How many records may wait; further records are dropped and counted.
    """

    def __init__(self, target: logging.Handler, max_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__(queue.SimpleQueue())
        self._target = target
        self._max_lines = max_lines
        self._process = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record that the target gets."""
        return record

    def build_notice(self, dropped: int, previous: logging.LogRecord) -> logging.LogRecord:
        """Build the record that reports dropped records, after *previous*."""
        message = f"({dropped} lines were dropped because they were not read in time)"
        return logging.makeLogRecord({"name": previous.name, "msg": message})

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop and count it if too many records wait."""
        if self._process != os.getpid():
            # This is the first record, or a fork left the thread and its queue with the parent process.
            self._process, self._listener = os.getpid(), _Listener(self._target, self.build_notice)
            self._listener.start()
        if self._listener.records.qsize() < self._max_lines:
            self._listener.records.put(record)
        else:
            self._listener.dropped += 1

    def wait_until_written(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until the target has all records, at most `seconds`; return whether it has."""
        return self._process != os.getpid() or self._listener.wait_until_done(seconds)

    def flush(self) -> None:
        """Wait a bounded time until the target has all records."""
        self.wait_until_written()

    def close(self) -> None:
        """Wait a bounded time for the target, then stop the thread and close the target."""
        # If the reader is stuck, the thread still uses the target.
        if self.wait_until_written():
            if self._process == os.getpid():
                self._process = 0
                self._listener.stop()
            self._target.close()
        super().close()


class _Listener(QueueListener):
    """The thread of a `BackgroundHandler`, which reports dropped records after the next one that it handles."""

    def __init__(
        self, target: logging.Handler, build_notice: Callable[[int, logging.LogRecord], logging.LogRecord]
    ) -> None:
        self.records: queue.SimpleQueue[Any] = queue.SimpleQueue()
        super().__init__(self.records, target)
        self.dropped = 0
        self._reported = 0
        self._build_notice = build_notice

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        if isinstance(record, threading.Event):
            record.set()
            return
        super().handle(record)
        # Only this thread changes `_reported`, and only the handler changes `dropped`.
        if dropped := self.dropped - self._reported:
            self._reported += dropped
            super().handle(self._build_notice(dropped, record))

    def wait_until_done(self, seconds: float) -> bool:
        done = threading.Event()
        self.records.put(done)
        return done.wait(seconds)


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


class LogHandler(BackgroundHandler):
    """Writes records to the log file of their server, or to standard error."""

    def __init__(self, config: LogConfig, max_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__(_LineWriter(config.directory), max_lines)
        self.setLevel(config.level.upper())
        self._config = config
        if config.directory is not None:
            _check_directory(config.directory, config.server)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Add the server and the line, in the context of the code that logs, to a record."""
        record_context = tracing.get_log_context() or NO_CONTEXT
        server = record_context.server or self._config.server
        format_record = _format_json if self._config.format == "json" else _format_text
        record.__dict__.update(server=server, line=format_record(record, record_context, server) + b"\n")
        return record

    def build_notice(self, dropped: int, previous: logging.LogRecord) -> logging.LogRecord:
        """Build the line that reports dropped lines."""
        sentence = f"{dropped} lines were dropped because they could not be written in time"
        notice = self.prepare(logging.LogRecord(LOGGER_NAME, logging.WARNING, "", 0, sentence, None, None))
        notice.__dict__["server"] = previous.__dict__["server"]
        return notice


class _LineWriter(logging.Handler):
    """Writes formatted lines to the log file of their server, or to standard error."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__()
        self._directory = directory
        self._files: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        # One call for each line: lines of several processes in one file do not mix.
        line: bytes = record.__dict__["line"]
        try:
            file = STDERR if self._directory is None else self._open_file(self._directory, record.__dict__["server"])
            while line:
                line = line[os.write(file, line) :]
        except OSError:
            # The reader is gone or the disk is full, and there is no other place to report it.
            return

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        super().close()

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
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _summarize_exception(record: logging.LogRecord) -> dict[str, str]:
    """Return the stack and type of an exception without its message, which may quote a model."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return {}
    return {"traceback": "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__}


class LogRelay(BackgroundHandler):
    """Relays lines of child processes to a text stream.

    Args:
        max_lines: How many lines may wait; further lines are dropped and counted.
    """

    def __init__(self, out: TextIO, *, max_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__(_StreamWriter(out), max_lines)

    def put(self, line: str) -> None:
        """Queue a line, or drop it if too many lines wait."""
        self.handle(logging.makeLogRecord({"msg": line}))


class _StreamWriter(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the name of the method it replaces
        """Drop all further lines: the reader is gone, and there is no other place to report it."""
        self.addFilter(lambda _: False)


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
