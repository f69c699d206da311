"""Figures: what a server has been asked and how it answered, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

EDGES = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
"""Upper edges of the buckets that answer times are counted in, seconds."""


class Figures:
    """What the server *name* has been asked; *gauges* are read whenever somebody looks.

    The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.time()
        self.gauges: dict[str, Callable[[], float]] = {}
        self._answers: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._answers[route, status] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]  # a sum of seconds is counted like the rest
        edge = next((each for each in EDGES if seconds <= each), float("inf"))
        self._buckets[route, edge] += 1

    def text(self) -> str:
        """Give all figures as text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# TYPE gymsdk_uptime_seconds gauge"
        yield f"gymsdk_uptime_seconds{self._label()} {time.time() - self.started:.3f}"
        for gauge, look in self.gauges.items():
            yield f"# TYPE gymsdk_{gauge} gauge"
            yield f"gymsdk_{gauge}{self._label()} {look():g}"
        yield "# TYPE gymsdk_requests_total counter"
        for (route, status), count in sorted(self._answers.items()):
            yield f"gymsdk_requests_total{self._label(route=route, status=str(status))} {count}"
        yield "# TYPE gymsdk_request_seconds histogram"
        for route in sorted(self._seconds):
            yield from self._histogram(route)

    def _histogram(self, route: str) -> Iterator[str]:
        below = 0
        for edge in (*EDGES, float("inf")):
            below += self._buckets[route, edge]
            named = "+Inf" if edge == float("inf") else f"{edge:g}"
            yield f"gymsdk_request_seconds_bucket{self._label(route=route, le=named)} {below}"
        yield f"gymsdk_request_seconds_sum{self._label(route=route)} {self._seconds[route]:.6f}"
        yield f"gymsdk_request_seconds_count{self._label(route=route)} {below}"

    def _label(self, **labels: str) -> str:
        pairs = ",".join(f'{key}="{value}"' for key, value in {"server": self.name, **labels}.items())
        return f"{{{pairs}}}"
