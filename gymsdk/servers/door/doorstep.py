"""The doorstep: requests refused before a server's routes are asked, each counted, and few of them in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from gymsdk import trail
from gymsdk.servers.watching.figures import Figures

REFUSED = "refused"
"""What stands in the place of a route where a request got to none."""

EVERY = 1.0
"""Seconds in which one refusal of each status has a line: the others have theirs in `debug`."""

LONGEST = 16
"""How much is told of the word that a client has for its method."""

STEP = "gymsdk.doorstep"
"""The key of an app's state, which each of its requests has too, under which its doorstep is."""

log = logging.getLogger("gymsdk.requests")


class Doorstep:
    """Where the requests that a server refuses are counted, in its *figures*."""

    def __init__(self, figures: Figures, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._figures = figures
        self._clock = clock
        self._quiet: dict[int, float] = {}

    def record(self, scope: Mapping[str, Any], status: int, route: str) -> None:
        """Count a request, and write its line unless there have been like it: whoever floods does not fill the log."""
        self._figures.record_response(route, status, 0.0)
        level = logging.INFO if route == REFUSED and self._is_rare(status) else logging.DEBUG
        if log.isEnabledFor(level):
            before = trail.follow(trail.begun(self._figures.name, scope["headers"]))
            _log(level, scope, status, route)
            trail.leave(before)

    def _is_rare(self, status: int) -> bool:
        now = self._clock()
        if now < self._quiet.get(status, 0.0):
            return False
        self._quiet[status] = now + EVERY
        return True


def refused(scope: Mapping[str, Any], status: int, route: str = REFUSED) -> None:
    """Say on the doorstep of the server that a request came to that it is refused, at a *route* if that is known."""
    step = scope.get("state", {}).get(STEP)
    if isinstance(step, Doorstep):
        step.record(scope, status, route)


def _log(level: int, scope: Mapping[str, Any], status: int, route: str) -> None:
    # Neither its path nor its headers: whatever a stranger writes there, a token meant for another server too.
    method, client = scope["method"][:LONGEST], (scope.get("client") or ("nobody",))[0]
    told = {"method": method, "route": route, "status": status, "client": client}
    log.log(level, "%s %s %d client=%s", method, route, status, client, extra={"told": told})
