"""A run's patience with a model, or with servers, that give no answers."""

from __future__ import annotations

from gymsdk.errors import ModelLost
from gymsdk.outcome import Failure, Rollout

GONE = frozenset({"model_unreachable", "model_unauthorized", "model_not_found", "server_unreachable", "judge_failed"})
"""Failures that no row brings about: a server is not there, or not for us."""

STREAK = 16
"""How many rollouts in a row may be lost to a server that is not there."""

SERVERS = frozenset({"server_unreachable", "server_timeout", "server_error"})
"""Failures of the servers that play a run, where they have not said more."""

NONE_YET = 64
"""How many rollouts may fail for them before any has been scored."""


class Patience:
    """Listens to a run; *scored* are the rollouts that an earlier part of the run has scored."""

    def __init__(self, *, scored: int = 0) -> None:
        self._scored = scored
        self._gone = 0
        self._failed = 0

    def heard(self, rollout: Rollout) -> None:
        """Count one finished rollout; raises `ModelLost` where further ones would only fail alike."""
        failure = rollout.failure
        if failure is None:
            self._scored += 1
            self._gone = 0
            return
        self._gone = self._gone + 1 if failure.kind in GONE else 0
        self._failed = self._failed + 1 if failure.stage == "model" or failure.kind in SERVERS else 0
        if self._gone >= STREAK:
            raise _lost(self._gone, failure)
        if not self._scored and self._failed >= NONE_YET:
            raise _lost(self._failed, failure)


def _lost(count: int, failure: Failure) -> ModelLost:
    return ModelLost(f"stopped, since {count} rollouts in a row failed alike ({failure.message})")
