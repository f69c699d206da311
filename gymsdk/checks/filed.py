"""Filed rows: those of a package's data files, all of them read, so that none breaks a run when its turn comes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gymsdk import rows
from gymsdk.checks.check import Finding
from gymsdk.checks.subject import Subject
from gymsdk.errors import BadRow

MOST = 20
"""Rows that cannot be read which are told of one file."""

DRAWN = 100
"""Rows of a split that are drawn where there is no file."""

MEND = "mend or remove the line; a run that comes to it ends there"


def unread(subject: Subject) -> list[Finding]:
    """Give the rows of each split that cannot be read: all of a file are looked at, the first of what is drawn."""
    if subject.given is not None:
        return []
    return [finding for split in subject.splits for finding in islice(_of(subject, split), MOST)]


def _of(subject: Subject, split: str) -> Iterator[Finding]:
    path = _path(subject, split)
    return _in_file(subject, path) if path else _in_draws(subject, split)


def _path(subject: Subject, split: str) -> Path | None:
    """Give the file that *split* is read from, `None` where the environment draws its tasks itself."""
    plugin = subject.environment.plugin
    home = getattr(plugin, "__file__", None)
    path = Path(home or "").parent / "data" / f"{split}.jsonl"
    return path if home and not hasattr(plugin, "tasks") and path.is_file() else None


def _in_file(subject: Subject, path: Path) -> Iterator[Finding]:
    for number, line in rows.lines(path):
        where = f"{path.parent.name}/{path.name}:{number}"
        try:
            row = rows.parsed(line, where=where)
        except BadRow as error:
            yield Finding(seen=str(error), mend=MEND)
            continue
        try:
            subject.environment.read(row)
        except BadRow as error:
            yield Finding(seen=f"{where}: {error}", mend=MEND)


def _in_draws(subject: Subject, split: str) -> Iterator[Finding]:
    number = 0
    try:
        for _ in islice(subject.environment.tasks(split, seed=subject.seed), DRAWN):
            number += 1
    except BadRow as error:
        yield Finding(seen=f"row {number + 1} of the split {split!r} cannot be read: {error}")
