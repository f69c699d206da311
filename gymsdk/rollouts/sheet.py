"""A sheet: a file of rows that is there once it is whole, and never takes another's place unasked."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Self

from gymsdk import rows
from gymsdk.errors import BadOutput
from gymsdk.types import Row


class Sheet:
    """The file at *path*, written as `with sheet:`; nothing is left of one that ends in an error.

    Raises `BadOutput` where it cannot be written, or is there and not to be replaced (*overwrite*).
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        free(path, overwrite=overwrite)
        self._path = path
        self._file: IO[bytes] | None = None
        self.count = 0

    def __enter__(self) -> Self:
        try:
            self._file = NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}.", delete=False)
        except OSError as error:
            raise self._unwritten(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None, "a sheet is entered before it is left"
        part = Path(self._file.name)
        try:
            if kind is None:
                os.fchmod(self._file.fileno(), 0o666 & ~_mask())
                self._file.close()
                part.replace(self._path)
        except OSError as error:
            raise self._unwritten(error) from None
        finally:
            with suppress(OSError):
                self._file.close()
            part.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Write one row."""
        assert self._file is not None, "a sheet is entered before it is written"
        try:
            self._file.write(rows.line(row))
        except OSError as error:
            raise self._unwritten(error) from None
        self.count += 1

    def _unwritten(self, error: OSError) -> BadOutput:
        return BadOutput(f"cannot write {self._path}: {error.strerror}; choose another --output")


def free(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is that is not to be replaced; raises `BadOutput`."""
    if path.is_dir():
        raise BadOutput(f"{path} is a folder; name a file with --output")
    if path.exists() and not overwrite:
        raise BadOutput(f"{path} is there; replace it with --overwrite, or choose another --output")


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
