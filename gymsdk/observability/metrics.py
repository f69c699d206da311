"""GPUs: how much those of this machine are used, as `nvidia-smi` says, where there is one."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

BUCKET_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
"""Upper edges of the buckets that answer times are counted in, seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several values of a gauge, told apart by its *labels*."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class ServerMetrics:
    """What the server *name* has been asked; *gauges*, and the *samples* of others, are read whenever somebody looks.

    Who looks waits for *looks* first, which bring them up to date. *in_flight* are requests that are being answered.

    The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.time()
        self.in_flight = 0
        self.gauges: dict[str, Callable[[], float]] = {}
        self.samples: dict[str, Callable[[], list[Sample]]] = {}
        self.looks: list[Callable[[], Awaitable[object]]] = []
        self._answers: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()

    def record_response(self, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._answers[route, status] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]  # a sum of seconds is counted like the rest
        edge = next((each for each in BUCKET_SECONDS if seconds <= each), float("inf"))
        self._buckets[route, edge] += 1

    async def render_current(self) -> str:
        """Give all figures as text, brought up to date."""
        for look in self.looks:
            await look()
        return self.render()

    def render(self) -> str:
        """Give all figures as text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# TYPE gymsdk_uptime_seconds gauge"
        yield f"gymsdk_uptime_seconds{self._label()} {time.time() - self.started:.3f}"
        yield "# TYPE gymsdk_requests_in_flight gauge"
        yield f"gymsdk_requests_in_flight{self._label()} {self.in_flight}"
        for gauge, look in self.gauges.items():
            yield f"# TYPE gymsdk_{gauge} gauge"
            yield f"gymsdk_{gauge}{self._label()} {look():g}"
        for gauge, several in self.samples.items():
            yield f"# TYPE gymsdk_{gauge} gauge"
            for each in several():
                yield f"gymsdk_{gauge}{self._label(**each.labels)} {each.value:.10g}"
        yield "# TYPE gymsdk_requests_total counter"
        for (route, status), count in sorted(self._answers.items()):
            yield f"gymsdk_requests_total{self._label(route=route, status=str(status))} {count}"
        yield "# TYPE gymsdk_request_seconds histogram"
        for route in sorted(self._seconds):
            yield from self._histogram(route)

    def _histogram(self, route: str) -> Iterator[str]:
        below = 0
        for edge in (*BUCKET_SECONDS, float("inf")):
            below += self._buckets[route, edge]
            named = "+Inf" if edge == float("inf") else f"{edge:g}"
            yield f"gymsdk_request_seconds_bucket{self._label(route=route, le=named)} {below}"
        yield f"gymsdk_request_seconds_sum{self._label(route=route)} {self._seconds[route]:.6f}"
        yield f"gymsdk_request_seconds_count{self._label(route=route)} {below}"

    def _label(self, **labels: str) -> str:
        pairs = ",".join(f'{key}="{_escape_label(value)}"' for key, value in {"server": self.name, **labels}.items())
        return f"{{{pairs}}}"


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


NVIDIA_SMI = "nvidia-smi"
NVIDIA_SMI_ARGS = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")

GPU_REFRESH_SECONDS = 10.0
"""Seconds for which what it says is believed."""

NVIDIA_SMI_SECONDS = 3.0
"""Seconds that it may take."""


def add_gpu_metrics(figures: ServerMetrics) -> None:
    """Have *figures* tell how much the GPUs of this machine are used; nothing where nobody can say."""
    if shutil.which(NVIDIA_SMI) is not None:
        gpus = GpuMonitor()
        figures.looks.append(gpus.refresh)
        figures.samples["gpu_utilization_ratio"] = gpus.utilization


class GpuMonitor:
    """The GPUs of this machine, asked for every `FRESH` seconds at the soonest."""

    def __init__(self) -> None:
        self._used: list[Sample] = []
        self._at = float("-inf")

    async def refresh(self) -> None:
        """Look again, where that was long ago."""
        if time.monotonic() - self._at >= GPU_REFRESH_SECONDS:
            self._at = time.monotonic()
            self._used = parse_utilization(await _run_nvidia_smi())

    def utilization(self) -> list[Sample]:
        """Give the share of the time in which each was at work."""
        return self._used


def parse_utilization(said: str) -> list[Sample]:
    """Give what each line of the tool's answer says; a GPU that does not tell, as a part of one may, is left out."""
    rows = (line.split(",") for line in said.splitlines() if line.count(",") == 1)
    return [Sample(int(used) / 100, {"gpu": gpu.strip()}) for gpu, used in rows if used.strip().isdecimal()]


async def _run_nvidia_smi() -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            NVIDIA_SMI, *NVIDIA_SMI_ARGS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        # It has been taken away, or may not be run: then nobody can say.
        return ""
    try:
        async with asyncio.timeout(NVIDIA_SMI_SECONDS):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return out.decode(errors="replace") if process.returncode == 0 else ""
