"""A torn line: the part of a last line that a killed writer leaves behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def cut(path: Path) -> None:
    """Cut a torn last line off the file at *path*, if there is one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _last_newline(file, size)
        if whole != size:
            file.truncate(whole)


def _last_newline(file: IO[bytes], size: int, block: int = 65536) -> int:
    """Give the size up to and with the last newline, 0 where there is none."""
    while size:
        start = max(0, size - block)
        file.seek(start)
        at = file.read(size - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        size = start
    return 0
