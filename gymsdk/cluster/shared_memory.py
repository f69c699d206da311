"""Memory that the workers of one deployment share: who owns a rollout or session id, and which models are paused."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_PAUSES = 64
"""The maximum number of model servers that share a pause."""

PAUSE = struct.Struct("=d")
PAUSES_BYTES = MAX_PAUSES * PAUSE.size

ENTRY = struct.Struct("=16sdQ")
"""An entry of the table: the digest of an id, when the entry expires, and the process that owns the id."""

ENTRIES_PER_BUCKET = 16
BUCKETS = 2**15
BUCKET_BYTES = ENTRIES_PER_BUCKET * ENTRY.size

SECRET_BYTES = 32
SECRET_START = PAUSES_BYTES + BUCKETS * BUCKET_BYTES

SHARED_BYTES = SECRET_START + SECRET_BYTES
"""The size of the shared file, 16 MiB. The operating system provides the pages that are used.

Beyond the end of the file, each worker locks the byte `SHARED_BYTES` + its process id as long as it runs.
"""

DIGEST_BYTES = 16


class SharedMemory:
    """The file that all workers map into their memory.

    Times are those of `time.monotonic`, which all processes of a machine share. The file outlives each worker, so a
    worker that starts again finds what the others know.

    Args:
        file: The descriptor of the file that `create_shared_file` returned. Create one instance per process and keep
            it until the process ends: when any descriptor of the file is closed, and an instance has one of its own,
            the process loses its locks.

    Attributes:
        secret: The secret with which the workers mark the requests that they forward to each other.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._memory = mmap.mmap(file, SHARED_BYTES)
        self.secret = self._memory[SECRET_START:SHARED_BYTES].hex()
        # The operating system releases the lock when the process ends. A later process with its id has no such lock.
        fcntl.lockf(file, fcntl.LOCK_EX, 1, SHARED_BYTES + os.getpid())

    def is_running(self, process: int) -> bool:
        """Return whether *process* runs and has opened the shared file."""
        if process == os.getpid():
            return True
        start = SHARED_BYTES + process
        try:
            # Shared, so that two processes that ask at the same time do not take each other for *process*.
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, start)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, start)
        return False

    def get_pause_end(self, model: int) -> float:
        """Return until when the model server with the number *model* is paused; 0 if it is not."""
        end: float = PAUSE.unpack_from(self._memory, model * PAUSE.size)[0]
        return end

    def set_pause_end(self, model: int, end: float) -> None:
        """Set until when the model server with the number *model* is paused."""
        PAUSE.pack_into(self._memory, model * PAUSE.size, end)

    def claim(self, id: str, process: int, seconds: float, *, take_from: int | None = None) -> int:
        """Return the process that owns *id*: the one whose claim has not expired, else *process* from now on.

        If *process* owns the id already, its claim is renewed. If the part of the table for *id* is full, the id whose
        claim expires first is forgotten.

        Args:
            id: The id.
            process: The process that asks.
            seconds: How long the claim lasts from now on.
            take_from: An owner that has ended. *process* becomes the owner if the id still belongs to that one.
        """
        digest, now = _compute_digest(id), time.monotonic()
        with self._lock_bucket(digest) as entries:
            chosen, first, expiry = entries[0], float("inf"), now + seconds
            for offset in entries:
                known, expires, owner = ENTRY.unpack_from(self._memory, offset)
                if known == digest:
                    if expires > now and owner not in {process, take_from}:
                        return int(owner)
                    if owner == process:
                        expiry = max(expiry, expires)
                    chosen = offset
                    break
                if expires < first:
                    chosen, first = offset, expires
            ENTRY.pack_into(self._memory, chosen, digest, expiry, process)
        return process

    def release(self, id: str, process: int) -> None:
        """Forget *id* if *process* owns it."""
        digest = _compute_digest(id)
        with self._lock_bucket(digest) as entries:
            for offset in entries:
                known, _, owner = ENTRY.unpack_from(self._memory, offset)
                if (known, owner) == (digest, process):
                    ENTRY.pack_into(self._memory, offset, bytes(DIGEST_BYTES), 0.0, 0)

    @contextmanager
    def _lock_bucket(self, digest: bytes) -> Iterator[range]:
        """Lock the bucket of *digest* against the other workers, and yield the offsets of its entries."""
        start = PAUSES_BYTES + int.from_bytes(digest[:4], "big") % BUCKETS * BUCKET_BYTES
        # The lock is held for microseconds; the operating system releases that of a killed worker.
        fcntl.lockf(self._file, fcntl.LOCK_EX, BUCKET_BYTES, start)
        try:
            yield range(start, start + BUCKET_BYTES, ENTRY.size)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, BUCKET_BYTES, start)


class SharedPause:
    """The pause of one model server, which all workers share.

    Args:
        memory: The shared memory.
        model: The number of the model server among those of the deployment.
    """

    def __init__(self, memory: SharedMemory, model: int) -> None:
        self._memory = memory
        self._model = model

    def get_remaining_seconds(self) -> float:
        """Return the seconds until the pause ends by itself; 0 or less if there is no pause."""
        return self._memory.get_pause_end(self._model) - time.monotonic()

    def begin(self, seconds: float) -> None:
        """Pause the model for at most *seconds*."""
        self._memory.set_pause_end(self._model, time.monotonic() + seconds)

    def end(self) -> None:
        """End the pause."""
        self._memory.set_pause_end(self._model, 0.0)


def create_shared_file() -> int:
    """Create the file that the workers share, and return its descriptor. The file has no name."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.truncate(SHARED_BYTES)
        if hasattr(os, "posix_fallocate"):
            # Without reserved blocks, a worker would be killed when it writes and the disk is full.
            os.posix_fallocate(file.fileno(), 0, SHARED_BYTES)
        os.pwrite(file.fileno(), secrets.token_bytes(SECRET_BYTES), SECRET_START)
        return os.dup(file.fileno())


def _compute_digest(id: str) -> bytes:
    return hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
