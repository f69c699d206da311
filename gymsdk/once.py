"""Log a warning once."""

from __future__ import annotations

import logging

MAX_WARNINGS = 64
"""The number of different warnings of a `OnceLogger`. Their texts can contain words of a policy or a client."""


class OnceLogger:
    """Logs each warning once, because a run can repeat its cause thousands of times.

    Args:
        log: The logger.
        limit: The number of different warnings to log.

    Attributes:
        warnings: The warnings that were logged, without their values.
    """

    def __init__(self, log: logging.Logger, limit: int = MAX_WARNINGS) -> None:
        self._log = log
        self._limit = limit
        self.warnings: set[str] = set()

    def warn(self, message: str, *values: object) -> None:
        """Log *message* with *values* in place of its `%s`, unless it was logged before, with any values."""
        if message not in self.warnings and len(self.warnings) < self._limit:
            self.warnings.add(message)
            self._log.warning(message, *values)
