"""Recognize whether the indexed part of a file is still the same.

The times of a file and the digests of its first and last block answer quickly. They miss a change in the middle of a
file if its times were set back, or if it was written again within one tick of the clock. The digest of the whole
indexed part decides wherever the times cannot be trusted.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, replace
from typing import IO

BLOCK_BYTES = 4096
"""The size of the first and of the last part of an indexed file that must be unchanged for the index to continue."""

MAX_BYTES_AT_ONCE = 16_000_000
"""The indexed bytes up to which a file is hashed as soon as its times have changed; more are hashed in parts."""

TICK_SECONDS = 0.1
"""How long two changes of a file may give it the same time: more than a tick of the kernel's clock."""

COARSE_TICK_SECONDS = 2.0
"""The same for a file system that stores whole seconds."""


@dataclass(slots=True)
class FileState:
    """How far a file of the run is indexed, and the status of the file at that time.

    Attributes:
        identity: The device and the inode of the file.
        size: The size up to which the file has been examined.
        modified: When the content was modified, in nanoseconds.
        changed: When the content or the inode was changed, in nanoseconds; no program can set this time back.
        is_trusted: Whether the indexed part is unchanged as long as the four values above are.
        offset: The end of the last indexed line.
        lines: The number of indexed lines.
        first: A digest of the first `BLOCK_BYTES` of the indexed part.
        last: A digest of the last `BLOCK_BYTES` of the indexed part.
        digest: A digest of the whole indexed part.
        bad: The number of lines that are not rollouts.
        bad_message: Why the first of them is not.
        bad_lines: The numbers of the first of them, separated by commas.
        rollouts: The number of rollouts.
        scored: The number of rollouts with a reward.
        earned: The sum of their rewards.
    """

    identity: str = ""
    size: int = 0
    modified: int = 0
    changed: int = 0
    is_trusted: bool = True
    offset: int = 0
    lines: int = 0
    first: str = ""
    last: str = ""
    digest: bytes = b""
    bad: int = 0
    bad_message: str = ""
    bad_lines: str = ""
    rollouts: int = 0
    scored: int = 0
    earned: float = 0.0

    @property
    def is_small(self) -> bool:
        """Whether the indexed part is hashed at once."""
        return self.offset <= MAX_BYTES_AT_ONCE

    def is_same(self, stat: os.stat_result) -> bool:
        """Return whether a file with the status *stat* looks like the file that was indexed."""
        return self.size == stat.st_size and self._has_times(stat)

    def observe(self, stat: os.stat_result, *, is_trusted: bool) -> FileState:
        """Return this state with the values of *stat*."""
        return replace(
            self,
            identity=_identify(stat),
            size=stat.st_size,
            modified=stat.st_mtime_ns,
            changed=stat.st_ctime_ns,
            is_trusted=is_trusted,
        )

    def check(self, file: IO[bytes], stat: os.stat_result) -> FileState | None:
        """Return this state with the values of *stat*, or `None` if the indexed part of *file* has changed."""
        if stat.st_size < self.offset or sign(file.fileno(), self) != self:
            return None
        if self.is_trusted and self._has_times(stat):
            # The pass over the file goes on.
            return self.observe(stat, is_trusted=True)
        if not self.is_small:
            return self.observe(stat, is_trusted=False)
        is_trusted = is_settled(stat)
        return self.observe(stat, is_trusted=is_trusted) if Verification(self).advance(file) else None

    def add_bad_line(self, number: int, message: str, most: int) -> None:
        """Count one more bad line; the numbers of the first *most* lines are kept."""
        if self.bad < most:
            self.bad_lines = f"{self.bad_lines},{number}".strip(",")
        self.bad += 1
        self.bad_message = self.bad_message or message

    def _has_times(self, stat: os.stat_result) -> bool:
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        return (self.identity, self.modified, self.changed) == (_identify(stat), *times)


class Verification:
    """Hashes the indexed part of a file in parts, and compares it with the digest in *state*.

    Args:
        state: The state of the file.
    """

    def __init__(self, state: FileState) -> None:
        self.state = state
        self._position = 0
        self._digest = b""

    def advance(self, file: IO[bytes], deadline: float | None = None) -> bool | None:
        """Hash lines until *deadline*; return whether the indexed part is unchanged, or `None` at the deadline."""
        file.seek(self._position)
        while self._position < self.state.offset:
            line = file.readline()
            if not line:
                return False
            self._position += len(line)
            self._digest = extend_digest(self._digest, line)
            if deadline is not None and time.monotonic() > deadline and self._position < self.state.offset:
                return None
        return self._digest == self.state.digest


def extend_digest(digest: bytes, line: bytes) -> bytes:
    """Return the digest of the indexed part with one more line."""
    hashed = hashlib.sha256(digest)
    hashed.update(line)
    return hashed.digest()


def is_settled(stat: os.stat_result) -> bool:
    """Return whether a change from now on gives the file other times than those in *stat*."""
    now = time.time()
    return all(
        abs(now - at / 1e9) > (TICK_SECONDS if at % 1_000_000_000 else COARSE_TICK_SECONDS)
        for at in (stat.st_mtime_ns, stat.st_ctime_ns)
    )


def sign(descriptor: int, state: FileState) -> FileState:
    """Return *state* with the digests of the file's first and last indexed block."""
    size = min(BLOCK_BYTES, state.offset)
    first, last = os.pread(descriptor, size, 0), os.pread(descriptor, size, state.offset - size)
    return replace(state, first=_digest(first), last=_digest(last))


def _identify(stat: os.stat_result) -> str:
    # SQLite's integers do not hold every inode.
    return f"{stat.st_dev}:{stat.st_ino}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
