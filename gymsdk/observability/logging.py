"""An outlet: lines of other processes, read as they come, and written by a thread of its own that nobody waits for."""

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
"""Lines that wait at most: what comes when there are as many is dropped, and counted."""

FLUSH_SECONDS = 2.0
"""Seconds that the end waits for lines that nobody takes."""


class LogWriter:
    """Writes lines in a thread of its own; *lost* makes the line that tells how many were dropped."""

    def __init__(self, lost: Callable[[int], bytes], most: int = MAX_QUEUED_LINES) -> None:
        self._lost = lost
        self._most = most
        self._thread: threading.Thread | None = None
        self._begin()

    def put(self, file: int, line: bytes) -> None:
        """Have *line* be written to *file*, or be counted where too many wait."""
        if self._process != os.getpid():
            # The thread is the parent's, and so is what waits for it.
            self._begin()
        with self._change:
            if len(self._waiting) >= self._most:
                self._dropped += 1
                return
            self._waiting.append((file, line))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gymsdk-logs", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all that came has been written, *seconds* at most; gives whether it has."""
        if self._process != os.getpid():
            return True
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._writing, seconds)

    def _begin(self) -> None:
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
        # Nobody reads it any more, or the disk is full: there is nowhere to say so.
        return


Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Form: TypeAlias = Literal["text", "json"]

LOGGER_NAME, REQUEST_LOGGER_NAME = "gymsdk", "gymsdk.requests"
"""The loggers of what gymsdk has to say, and of a line for each request."""

SERVER_ERROR_LOGGER_NAME = "uvicorn.error"
"""The logger that tells of what nobody has thought of, with a traceback."""

STDERR = 2
NO_CONTEXT = LogContext()


class LogConfig(BaseModel):
    """What is logged, from which *level* on, in which *format*, and to the files of which *directory*.

    *server* is whose a line is that belongs to no request: a process that holds one server says which.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Level = "warning"
    format: Form = "text"
    directory: Path | None = None
    server: str = "gymsdk"

    @property
    def takes_stderr(self) -> bool:
        """Whether its lines are all that is to be on standard error: else gymsdk's warnings are, as everywhere."""
        return self.directory is None and (self.level, self.format) != ("warning", "text")

    @property
    def to_options(self) -> list[str]:
        """The options by which another process logs alike."""
        folder = [] if self.directory is None else ["--log-dir", str(self.directory)]
        return ["--log-level", self.level, "--log-format", self.format, *folder]


def parse_log_config(level: str, format: str, directory: Path | None = None, *, server: str = "gymsdk") -> LogConfig:
    """Give what is asked for in words; raises `UsageError` where a word is none."""
    for option, word, words in (("level", level, get_args(Level)), ("format", format, get_args(Form))):
        if word not in words:
            raise UsageError(f"--log-{option} {word}: write one of {', '.join(words)}")
    return LogConfig.model_validate({"level": level, "format": format, "directory": directory, "server": server})


@contextmanager
def log_to(asked: LogConfig) -> Iterator[None]:
    """Log as *asked* while the context is open; raises `UsageError` where the directory cannot be written."""
    handler = configure(asked)
    try:
        yield
    finally:
        if handler is not None:
            _drop(handler)


def configure(asked: LogConfig) -> LogHandler | None:
    """Log as *asked* from now on; gives what does, `None` where that is as it is anyway. Raises `UsageError`."""
    if not asked.takes_stderr and asked.directory is None:
        return None
    handler = LogHandler(asked)
    for name in (LOGGER_NAME, REQUEST_LOGGER_NAME):
        logging.getLogger(name).setLevel(asked.level.upper())
        logging.getLogger(name).addHandler(handler)
    # Who shows gymsdk's warnings to people shows them no requests.
    logging.getLogger(REQUEST_LOGGER_NAME).propagate = False
    logging.getLogger(SERVER_ERROR_LOGGER_NAME).addHandler(handler)
    return handler


def _drop(handler: LogHandler) -> None:
    for name in (LOGGER_NAME, REQUEST_LOGGER_NAME, SERVER_ERROR_LOGGER_NAME):
        logging.getLogger(name).removeHandler(handler)
    logging.getLogger(LOGGER_NAME).setLevel(logging.NOTSET)
    logging.getLogger(REQUEST_LOGGER_NAME).setLevel(logging.CRITICAL)
    logging.getLogger(REQUEST_LOGGER_NAME).propagate = True
    handler.close()


class LogHandler(logging.Handler):
    """Writes a line whole, to the file of the server it is from, or to standard error where there is no directory."""

    def __init__(self, asked: LogConfig) -> None:
        super().__init__(asked.level.upper())
        self._asked = asked
        self._files: dict[str, int] = {}
        self._writer = LogWriter(self._format_dropped)
        if asked.directory is not None:
            _check_directory(asked.directory, asked.server)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of one record."""
        try:
            here = context.get_log_context() or NO_CONTEXT
            server = here.server or self._asked.server
            line = (
                _format_json(record, here, server)
                if self._asked.format == "json"
                else _format_text(record, here, server)
            )
            directory = self._asked.directory
            self._writer.put(STDERR if directory is None else self._open_file(directory, server), line + b"\n")
        except Exception:  # noqa: BLE001  # as every handler has it: what cannot be logged must not end what is told of
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was logged is written, for a bounded time."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        # Under a thread that still writes to them, their numbers must not become another's.
        done = self._writer.flush()
        while done and self._files:
            os.close(self._files.popitem()[1])
        super().close()

    def _format_dropped(self, number: int) -> bytes:
        sentence = f"{number} lines were not written: nobody took them in time"
        record = logging.LogRecord(LOGGER_NAME, logging.WARNING, "", 0, sentence, None, None)
        make = _format_json if self._asked.format == "json" else _format_text
        return make(record, NO_CONTEXT, self._asked.server) + b"\n"

    def _open_file(self, directory: Path, server: str) -> int:
        if server not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files[server] = os.open(_log_path(directory, server), flags, 0o644)
        return self._files[server]


def _log_path(directory: Path, server: str) -> Path:
    return directory / f"{get_file_stem(server)}.log"


def _check_directory(directory: Path, server: str) -> None:
    """Make the *directory*, and refuse one that cannot be written; raises `UsageError`."""
    # Now, and not with the first line, with which its file is made: who asked is there to be told.
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        if (file := _log_path(directory, server)).exists():
            file.open("ab").close()
    except OSError as error:
        sentence = f"--log-dir {directory} cannot be written ({error.strerror or error})"
        raise UsageError(f"{sentence}; name a folder that this user may write") from None


def _format_json(record: logging.LogRecord, here: LogContext, server: str) -> bytes:
    told: dict[str, Any] = getattr(record, "told", {})
    line = {
        "time": _format_time(record),
        "level": record.levelname.lower(),
        "server": server,
        "rollout_id": here.rollout or None,
        "request_id": here.request or None,
        "message": record.getMessage(),
        "fields": told | _summarize_exception(record),
    }
    return jsonl.dump_json(line, default=str)


def _format_text(record: logging.LogRecord, here: LogContext, server: str) -> bytes:
    about = f"{server} rollout={here.rollout or '-'} request={here.request or '-'}"
    said = " ".join([record.getMessage(), *_summarize_exception(record).values()])
    # One record, one line: else whoever looks for a rollout finds but the first of them.
    whole = said.replace("\\", r"\\").replace("\r", r"\r").replace("\n", r"\n")
    return f"{_format_time(record)} {record.levelname.lower()} {about} {whole}".encode(errors="backslashreplace")


def _format_time(record: logging.LogRecord) -> str:
    return f"{_format_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _format_second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _summarize_exception(record: logging.LogRecord) -> dict[str, str]:
    """Give where an exception comes from, and of which type it is: what it says may hold what a policy said."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return {}
    return {"traceback": "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__}


MAX_RELAYED_LINES = 10_000
"""Lines that wait to be written; beyond these they are left out, and counted."""

CLOSE_SECONDS = 1.0
"""Seconds that what waits may take to be written at the end."""

MAX_LINE_BYTES = 2**20
"""Bytes that a line may have to be read in one piece."""


class LogRelay:
    """Writes lines to *out*, in their order, at most *most* of them waiting."""

    def __init__(self, out: TextIO, *, most: int = MAX_RELAYED_LINES) -> None:
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(most)
        self._lost = 0
        self._writing = threading.Thread(target=self._write, name="outlet", daemon=True)

    def start(self) -> None:
        """Write what waits, and what comes."""
        self._writing.start()

    def put(self, line: str) -> None:
        """Have *line* be written, or left out where too many wait."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Have what waits be written, as far as that is read in time."""
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
            told = f"({lost} lines were left out: nobody read them)\n" if lost else ""
            try:
                self._out.write(f"{told}{line}\n")
                self._out.flush()
            except (OSError, ValueError):
                # Nobody is there to read any more.
                return


async def read_lines(mouth: int) -> AsyncIterator[str]:
    """Yield the lines that come out of the pipe *mouth*, which is closed then, one longer than `LINE` in pieces."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(mouth, "rb", 0)
    )
    try:
        begun = b""
        while some := await reader.read(MAX_LINE_BYTES):
            *whole, begun = (begun + some).split(b"\n")
            if len(begun) > MAX_LINE_BYTES:
                whole, begun = [*whole, begun], b""
            for line in whole:
                yield _decode_line(line)
        if begun:
            yield _decode_line(begun)
    finally:
        transport.close()


def _decode_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
