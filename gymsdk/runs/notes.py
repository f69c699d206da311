"""Annotations of rollouts: tags and texts, appended to a file of the run."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymsdk import jsonl
from gymsdk.errors import BadRow, GymsdkError, UsageError
from gymsdk.runs.source import NOTES, RunSource, find_read_error, get_default_path, open_regular
from gymsdk.types import Row


class Note(BaseModel):
    """The annotation of a rollout or of one of its items. A later note about the same thing replaces an earlier one.

    Attributes:
        id: The rollout, `TASK:REPEAT`.
        item: The index of the item in the conversation; `None` for the whole rollout.
        tags: Short words to filter by.
        text: Free text.
        author: Who wrote it.
        time: When, in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^\d+:\d+$", max_length=40)
    item: int | None = Field(default=None, ge=0)
    tags: list[str] = Field(default=[], max_length=50)
    text: str = Field(default="", max_length=20_000)
    author: str = Field(default="", max_length=100)
    time: float = 0.0


class RunNotes:
    """The annotations of one run.

    Args:
        source: The run. Its folder holds the file, or the user's cache folder if it is read-only.
    """

    def __init__(self, source: RunSource) -> None:
        own = source.folder / (NOTES if source.path.is_dir() else f"{source.path.stem}_{NOTES}")
        self.is_beside_run = os.access(own if own.exists() else own.parent, os.W_OK)
        self.path = own if self.is_beside_run or own.exists() else _get_cached_path(source)
        self._additional = None if self.is_beside_run else _get_cached_path(source)

    def read(self) -> list[Note]:
        """Return the latest note about each rollout and item, in the order of their times; empty notes are left out."""
        latest = {(note.id, note.item): note for note in self._read()[0]}
        return sorted((note for note in latest.values() if note.tags or note.text), key=lambda note: note.time)

    def describe_state(self) -> str:
        """Return a text that differs after a note was added: the sizes and times of the files."""
        return jsonl.dump_json([_measure(path) for path in filter(None, (self.path, self._additional))]).decode()

    def list_bad_lines(self) -> list[Row]:
        """Return the files with lines that are not notes of this version, their number, and why the first is not."""
        errors = self._read()[1]
        return [{"file": self.path.name, "count": len(errors), "message": errors[0]}] if errors else []

    def _read(self) -> tuple[list[Note], list[str]]:
        """Return all notes in the order of their lines, and the errors of the other lines."""
        notes, errors = [], []
        for path in filter(None, (self.path, self._additional)):
            try:
                with open_regular(path) as file:
                    lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
            except FileNotFoundError:
                continue
            except OSError as error:
                errors.append(f"{path.name}: {error.strerror or error}")
                continue
            for number, line in lines:
                try:
                    notes.append(Note.model_validate(jsonl.parse_row(line, where=f"{path.name}:{number}")))
                except ValidationError as error:
                    errors.append(f"{path.name}:{number}: {_describe(error)}")
                except BadRow as error:
                    errors.append(str(error))
        return notes, errors

    def add(self, row: Row) -> Note:
        """Append a note, with the time and the user's name, and return it.

        Raises:
            UsageError: A field is not valid.
            GymsdkError: The file cannot be written.
        """
        try:
            note = Note.model_validate({"author": _get_user(), **row, "time": round(time.time(), 3)})
        except ValidationError as error:
            raise UsageError(_describe(error)) from None
        path = self.path if self.is_beside_run else self._additional or self.path
        if why := find_read_error(path):
            raise GymsdkError(f"{path} cannot be written: {why}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(jsonl.dump_row(note.model_dump()))
        except OSError as error:
            raise GymsdkError(f"{path} cannot be written: {error.strerror}") from error
        return note


def _measure(path: Path) -> list[int]:
    try:
        stat = path.stat()
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def _describe(error: ValidationError) -> str:
    first = error.errors(include_input=False)[0]
    return f"the note's {'.'.join(map(str, first['loc']))}: {first['msg']}"


def _get_cached_path(source: RunSource) -> Path:
    return get_default_path(source).with_suffix(".notes.jsonl")


def _get_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A container may run with a user id without a name.
        return ""
