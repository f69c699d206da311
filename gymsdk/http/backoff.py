"""The delays between attempts: exponential, jittered, bounded, and never shorter than a server's `Retry-After`.

This module is separate from the HTTP client because the supervisor needs the delays without the client.
"""

from __future__ import annotations

import random

from pydantic import BaseModel, ConfigDict, Field


class Backoff(BaseModel):
    """The delays between the attempts of one operation.

    Attributes:
        first: The longest delay after the first failed attempt, in seconds; it doubles with each further attempt.
        longest: The bound of that delay, in seconds.
    """

    model_config = ConfigDict(frozen=True)

    first: float = Field(0.5, ge=0)
    longest: float = Field(8.0, ge=0)

    def get_delay(self, attempt: int, retry_after: float | None = None) -> float:
        """Return the seconds to wait after a failed attempt.

        Args:
            attempt: The number of the failed attempt, counted from 0.
            retry_after: The seconds for which the server asked for no requests, if any; the delay is longer than that.
        """
        delay = min(self.longest, self.first * 2.0 ** min(attempt, 60))
        if not retry_after:
            return add_jitter(delay)
        # A server sends many clients the same `Retry-After`. They must not return at the same moment.
        return retry_after + random.uniform(0.0, max(delay, min(self.longest, retry_after / 2)))


def add_jitter(seconds: float, fraction: float = 0.5) -> float:
    """Return *seconds*, shortened at random by up to *fraction*, so that processes do not stay synchronised."""
    return seconds * random.uniform(1.0 - fraction, 1.0)
