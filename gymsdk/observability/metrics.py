"""Metrics of a server in the Prometheus text format, and the GPU utilization of its machine."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

BUCKET_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
"""Upper bounds of the histogram buckets for response times, in seconds."""


NVIDIA_SMI = "nvidia-smi"

NVIDIA_SMI_ARGS = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")

GPU_REFRESH_SECONDS = 10.0
"""Seconds that a result is cached."""

NVIDIA_SMI_SECONDS = 3.0
"""Timeout of `nvidia-smi`, in seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a gauge with its labels."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class ServerMetrics:
    """The metrics of one server.

    The format is https://prometheus.io/docs/instrumenting/exposition_formats/.

    Attributes:
        name: The server's name.
        started: When the server started, in seconds since the epoch.
        in_flight: How many requests are being answered.
        gauges: Functions that return a gauge's value, by name.
        samples: Functions that return a gauge's labelled values, by name.
        updates: Functions that update the values before they are rendered.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.time()
        self.in_flight = 0
        self.gauges: dict[str, Callable[[], float]] = {}
        self.samples: dict[str, Callable[[], list[Sample]]] = {}
        self.updates: list[Callable[[], Awaitable[object]]] = []
        self._answers: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()

    def record_response(self, route: str, status: int, seconds: float) -> None:
        """Count one response."""
        self._answers[route, status] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]  # a Counter of float seconds
        edge = next((bound for bound in BUCKET_SECONDS if seconds <= bound), float("inf"))
        self._buckets[route, edge] += 1

    async def render_current(self) -> str:
        """Update the values and render all metrics as text."""
        for update in self.updates:
            await update()
        return self.render()

    def render(self) -> str:
        """Render all metrics as text."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# TYPE gymsdk_uptime_seconds gauge"
        yield f"gymsdk_uptime_seconds{self._label()} {time.time() - self.started:.3f}"
        yield "# TYPE gymsdk_requests_in_flight gauge"
        yield f"gymsdk_requests_in_flight{self._label()} {self.in_flight}"
        for gauge, read in self.gauges.items():
            yield f"# TYPE gymsdk_{gauge} gauge"
            yield f"gymsdk_{gauge}{self._label()} {read():g}"
        for gauge, read_samples in self.samples.items():
            yield f"# TYPE gymsdk_{gauge} gauge"
            for sample in read_samples():
                yield f"gymsdk_{gauge}{self._label(**sample.labels)} {sample.value:.10g}"
        yield "# TYPE gymsdk_requests_total counter"
        for (route, status), count in sorted(self._answers.items()):
            yield f"gymsdk_requests_total{self._label(route=route, status=str(status))} {count}"
        yield "# TYPE gymsdk_request_seconds histogram"
        for route in sorted(self._seconds):
            yield from self._histogram(route)

    def _histogram(self, route: str) -> Iterator[str]:
        cumulative = 0
        for edge in (*BUCKET_SECONDS, float("inf")):
            cumulative += self._buckets[route, edge]
            bound = "+Inf" if edge == float("inf") else f"{edge:g}"
            yield f"gymsdk_request_seconds_bucket{self._label(route=route, le=bound)} {cumulative}"
        yield f"gymsdk_request_seconds_sum{self._label(route=route)} {self._seconds[route]:.6f}"
        yield f"gymsdk_request_seconds_count{self._label(route=route)} {cumulative}"

    def _label(self, **labels: str) -> str:
        pairs = ",".join(f'{key}="{_escape_label(value)}"' for key, value in {"server": self.name, **labels}.items())
        return f"{{{pairs}}}"


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def add_gpu_metrics(metrics: ServerMetrics) -> None:
    """Add the utilization of this machine's GPUs to the metrics, if `nvidia-smi` is installed."""
    if shutil.which(NVIDIA_SMI) is not None:
        gpus = GpuMonitor()
        metrics.updates.append(gpus.refresh)
        metrics.samples["gpu_utilization_ratio"] = gpus.utilization


class GpuMonitor:
    """The utilization of this machine's GPUs, updated at most every `GPU_REFRESH_SECONDS` seconds."""

    def __init__(self) -> None:
        self._used: list[Sample] = []
        self._at = float("-inf")

    async def refresh(self) -> None:
        """Query the utilization again if the last result is old."""
        if time.monotonic() - self._at >= GPU_REFRESH_SECONDS:
            self._at = time.monotonic()
            self._used = parse_utilization(await _run_nvidia_smi())

    def utilization(self) -> list[Sample]:
        """Return each GPU's utilization, from 0 to 1."""
        return self._used


def parse_utilization(text: str) -> list[Sample]:
    """Parse the output of `nvidia-smi`; GPUs without a number, such as MIG parts, are left out."""
    rows = (line.split(",") for line in text.splitlines() if line.count(",") == 1)
    return [Sample(int(percent) / 100, {"gpu": gpu.strip()}) for gpu, percent in rows if percent.strip().isdecimal()]


async def _run_nvidia_smi() -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            NVIDIA_SMI, *NVIDIA_SMI_ARGS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        # The tool was removed or cannot be run.
        return ""
    try:
        async with asyncio.timeout(NVIDIA_SMI_SECONDS):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return out.decode(errors="replace") if process.returncode == 0 else ""
