"""Advisory locks of files and folders, which end with the process that holds them.

The kernel releases such a lock when the last descriptor of its open file is closed, and a forked child inherits the
descriptors of its parent. If an environment forks, the child would keep the lock after the parent was killed.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_held: set[int] = set()
"""The descriptors of locks that this process holds or is about to take."""

_mutex = threading.Lock()
"""Held while `_held` changes, and while this process forks: a new descriptor must not be missing in `_held` then."""


def open_folder(path: Path, *, follow_links: bool = True) -> int:
    """Open the folder at *path*, and return the descriptor for `lock`, which forked children do not keep.

    Raises:
        OSError: The folder cannot be opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow_links else os.O_NOFOLLOW)
    with _mutex:
        descriptor = os.open(path, flags)
        _held.add(descriptor)
    return descriptor


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock the open file of *descriptor* for this process.

    Args:
        descriptor: The descriptor.
        wait: Whether to wait while another process holds the lock.

    Raises:
        BlockingIOError: Another process holds the lock.
        OSError: The file system has no locks.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def close_folder(descriptor: int) -> None:
    """Release the lock of *descriptor*, and close it. In a forked child, it is closed already."""
    with _mutex:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


@contextmanager
def hold_lock(file: IO[Any]) -> Iterator[None]:
    """Hold the lock of *file* inside the block, and wait for it first."""
    fcntl.flock(file.fileno(), fcntl.LOCK_EX)
    try:
        yield
        file.flush()
    finally:
        # Closing the file would not release the lock while a child that was forked meanwhile has it open.
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
    _mutex.release()


os.register_at_fork(before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_close_in_child)
