"""Logs: what the servers of a process have to say, a line each, with the server, rollout and request it is about.

Nothing of a prompt, an answer, a key or a token is in the line of a request.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict

from gymsdk import trail, values
from gymsdk.errors import UsageError
from gymsdk.servers.watching.profiling import named
from gymsdk.servers.watching.writing import Writer
from gymsdk.trail import Trail

Level: TypeAlias = Literal["debug", "info", "warning", "error"]
Form: TypeAlias = Literal["text", "json"]

WORDS, REQUESTS = "gymsdk", "gymsdk.requests"
"""The loggers of what gymsdk has to say, and of a line for each request."""

BUGS = "uvicorn.error"
"""The logger that tells of what nobody has thought of, with a traceback."""

STDERR = 2
NOWHERE = Trail()


class Logging(BaseModel):
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


def asked(level: str, format: str, directory: Path | None = None, *, server: str = "gymsdk") -> Logging:
    """Give what is asked for in words; raises `UsageError` where a word is none."""
    for option, word, words in (("level", level, get_args(Level)), ("format", format, get_args(Form))):
        if word not in words:
            raise UsageError(f"--log-{option} {word}: write one of {', '.join(words)}")
    return Logging.model_validate({"level": level, "format": format, "directory": directory, "server": server})


@contextmanager
def kept(asked: Logging) -> Iterator[None]:
    """Log as *asked* while the context is open; raises `UsageError` where the directory cannot be written."""
    handler = configure(asked)
    try:
        yield
    finally:
        if handler is not None:
            _drop(handler)


def configure(asked: Logging) -> Lines | None:
    """Log as *asked* from now on; gives what does, `None` where that is as it is anyway. Raises `UsageError`."""
    if not asked.takes_stderr and asked.directory is None:
        return None
    handler = Lines(asked)
    for name in (WORDS, REQUESTS):
        logging.getLogger(name).setLevel(asked.level.upper())
        logging.getLogger(name).addHandler(handler)
    # Who shows gymsdk's warnings to people shows them no requests.
    logging.getLogger(REQUESTS).propagate = False
    logging.getLogger(BUGS).addHandler(handler)
    return handler


def _drop(handler: Lines) -> None:
    for name in (WORDS, REQUESTS, BUGS):
        logging.getLogger(name).removeHandler(handler)
    logging.getLogger(WORDS).setLevel(logging.NOTSET)
    logging.getLogger(REQUESTS).setLevel(logging.CRITICAL)
    logging.getLogger(REQUESTS).propagate = True
    handler.close()


class Lines(logging.Handler):
    """Writes a line whole, to the file of the server it is from, or to standard error where there is no directory."""

    def __init__(self, asked: Logging) -> None:
        super().__init__(asked.level.upper())
        self._asked = asked
        self._files: dict[str, int] = {}
        self._writer = Writer(self._format_dropped)
        if asked.directory is not None:
            _check(asked.directory, asked.server)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of one record."""
        try:
            here = trail.current() or NOWHERE
            server = here.server or self._asked.server
            line = _json(record, here, server) if self._asked.format == "json" else _text(record, here, server)
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
        record = logging.LogRecord(WORDS, logging.WARNING, "", 0, sentence, None, None)
        make = _json if self._asked.format == "json" else _text
        return make(record, NOWHERE, self._asked.server) + b"\n"

    def _open_file(self, directory: Path, server: str) -> int:
        if server not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files[server] = os.open(_path(directory, server), flags, 0o644)
        return self._files[server]


def _path(directory: Path, server: str) -> Path:
    return directory / f"{named(server)}.log"


def _check(directory: Path, server: str) -> None:
    """Make the *directory*, and refuse one that cannot be written; raises `UsageError`."""
    # Now, and not with the first line, with which its file is made: who asked is there to be told.
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        if (file := _path(directory, server)).exists():
            file.open("ab").close()
    except OSError as error:
        sentence = f"--log-dir {directory} cannot be written ({error.strerror or error})"
        raise UsageError(f"{sentence}; name a folder that this user may write") from None


def _json(record: logging.LogRecord, here: Trail, server: str) -> bytes:
    told: dict[str, Any] = getattr(record, "told", {})
    line = {
        "time": _time(record),
        "level": record.levelname.lower(),
        "server": server,
        "rollout_id": here.rollout or None,
        "request_id": here.request or None,
        "message": record.getMessage(),
        "fields": told | _traceback(record),
    }
    return values.written(line, default=str)


def _text(record: logging.LogRecord, here: Trail, server: str) -> bytes:
    about = f"{server} rollout={here.rollout or '-'} request={here.request or '-'}"
    said = " ".join([record.getMessage(), *_traceback(record).values()])
    # One record, one line: else whoever looks for a rollout finds but the first of them.
    whole = said.replace("\\", r"\\").replace("\r", r"\r").replace("\n", r"\n")
    return f"{_time(record)} {record.levelname.lower()} {about} {whole}".encode(errors="backslashreplace")


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _traceback(record: logging.LogRecord) -> dict[str, str]:
    """Give where an exception comes from, and of which type it is: what it says may hold what a policy said."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return {}
    return {"traceback": "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__}
