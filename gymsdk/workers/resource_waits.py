"""Work of this process that waits for resources of a cluster, for the log and `gymsdk status`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

WAIT_SECONDS = 10.0
"""Seconds after which work that waits for resources is a problem."""

LOG_SECONDS = 60.0
"""Seconds between two log lines about the same work."""

GRADINGS, REPLICAS = "gradings", "replicas"
"""The kinds of work that wait."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class ResourceWait:
    """Work that waits.

    Attributes:
        work: What waits.
        count: How many waits there are.
        seconds: For how long the longest has waited.
        need: The resources that the work waits for.
    """

    work: str
    count: int
    seconds: float
    need: str

    def describe(self) -> str:
        """Return a sentence without a subject for the place."""
        subject = f"1 {self.work.removesuffix('s')} has" if self.count == 1 else f"{self.count} {self.work} have"
        return f"{subject} waited {self.seconds:.0f} s for {self.need}"


class ResourceWaits:
    """The work that waits, by kind. Threads may report and read at the same time."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[int, float, str]] = {}
        self._logged_at: dict[str, float] = {}

    def report(self, work: str, count: int, seconds: float, need: str) -> None:
        """Report that *count* of *work* wait for *need*, the longest for *seconds*; log it if that is long."""
        self._waits[work] = (count, time.monotonic() - seconds, need)
        now = time.monotonic()
        if seconds >= WAIT_SECONDS and now - self._logged_at.get(work, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_at[work] = now
            log.warning("%s", ResourceWait(work, count, seconds, need).describe())

    def clear(self, work: str) -> None:
        """Report that no *work* waits."""
        waited = self._waits.pop(work, None)
        if waited is not None and self._logged_at.pop(work, None) is not None:
            log.warning("%s no longer wait for %s, after %.0f s", work, waited[2], time.monotonic() - waited[1])

    def list_waits(self, work: str) -> Sequence[ResourceWait]:
        """Return the wait of this kind of *work*, if there is one."""
        waited = self._waits.get(work)
        if waited is None:
            return ()
        count, since, need = waited
        return (ResourceWait(work, count, time.monotonic() - since, need),)


resource_waits = ResourceWaits()
"""The work of this process that waits."""
