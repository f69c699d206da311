"""The folder in which a command was started. All relative paths of the command start there until it ends.

The code of an environment may change the working folder of the process, and someone may remove the folder.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gymsdk.errors import UsageError
from gymsdk.once import OnceLogger

CLONE_FS = 0x200
"""The flag of `unshare(2)` that gives a thread its own working folder, root folder and umask."""

PROCESS_FOLDER = "/proc/self/cwd"
"""The working folder of the process's main thread on Linux, even if it has been removed."""

once = OnceLogger(logging.getLogger("gymsdk"))

_started: Path | None = None


@contextmanager
def keep_working_folder() -> Iterator[None]:
    """Resolve relative paths in the present working folder inside the block, whatever becomes of it."""
    global _started  # noqa: PLW0603 - a property of the process
    before, _started = _started, find_working_folder()
    try:
        yield
    finally:
        _started = before


def find_working_folder() -> Path | None:
    """Return the working folder of the command, else of the process; `None` if it has been removed."""
    try:
        return _started or Path(os.getcwd())  # noqa: PTH109 - `Path.cwd` is the same
    except FileNotFoundError:
        return None


def get_working_folder() -> Path:
    """Return the working folder of the command, else of the process.

    Raises:
        UsageError: The folder has been removed.
    """
    folder = find_working_folder()
    if folder is None:
        raise UsageError("the working folder has been removed; change to another folder, as with: cd ~")
    return folder


def resolve_path(path: Path) -> Path:
    """Return *path* as an absolute path.

    Raises:
        UsageError: The path is relative, and the working folder has been removed.
    """
    return path if path.is_absolute() else get_working_folder() / path


def shorten_path(path: Path) -> Path:
    """Return *path* as a user of the command writes it: relative if it is below the working folder."""
    folder = find_working_folder()
    return path.relative_to(folder) if folder is not None and path.is_relative_to(folder) else path


def separate_thread() -> bool:
    """Give this thread its own working folder, where the system can, and return whether it could.

    A plain hook that changes the working folder for a moment then changes it neither for the host nor for the hooks in
    other threads.
    """
    if sys.platform != "linux" or not os.path.exists(PROCESS_FOLDER):  # noqa: PTH110 - also in a removed folder
        return False
    import ctypes

    # `os.unshare` exists only since Python 3.12. A container may forbid the call.
    return bool(ctypes.CDLL(None).unshare(CLONE_FS) == 0)


def enter_process_folder() -> None:
    """Set the working folder of this thread, which must be separate, to that of the process."""
    try:
        os.chdir(PROCESS_FOLDER)
    except OSError as error:
        once.warn("a hook begins in the working folder of the hook before it, not in that of the process: %s", error)
