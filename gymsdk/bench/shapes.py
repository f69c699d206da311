"""The shapes of rollouts that a benchmark compares, after the capacity table of NeMo Gym's documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gymsdk.bench import shape_environment
from gymsdk.bench.report import BenchResult, CostFactors, LoadResult
from gymsdk.bench.shape_environment import SHAPE_PATTERN
from gymsdk.bench.stage import SERVERS
from gymsdk.environment import Environment
from gymsdk.errors import UsageError

ENVIRONMENT = "bench"
"""The name of the benchmark's own environment in the benchmark's servers."""

REFERENCE_FACTORS = {"simple": 1.0, "steps:5": 5.0, "turns:10": 10.0}
"""How much slower a rollout is than a simple one, according to NeMo Gym's capacity table."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a rollout, for example `steps:5`: its kind, and the number of tool calls or user turns."""

    text: str

    def __str__(self) -> str:
        """Return the shape as users write it."""
        return self.text

    @property
    def is_simple(self) -> bool:
        """Whether a rollout is one model call without tools."""
        return self.text == "simple"


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Return the shapes in a comma-separated list without repetitions; raises `UsageError` if one is invalid."""
    words = dict.fromkeys(word.strip() for word in text.split(","))
    for word in words:
        if SHAPE_PATTERN.fullmatch(word) is None:
            raise UsageError(
                f"--shape {text}: {word!r} is not a shape; write simple, steps:N or turns:N,"
                " as in --shape simple,steps:5,turns:10"
            )
    return tuple(map(Shape, words))


def build_environment(shape: Shape) -> Environment:
    """Return the benchmark's own environment with rollouts of *shape*."""
    return Environment(ENVIRONMENT, shape_environment, {"shape": str(shape)})


def install(site: Path) -> Path:
    """Register the benchmark's own environment in the folder *site*, for processes that have it on their path.

    Returns:
        *site*.
    """
    metadata = site / "gymsdk_bench-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gymsdk-bench\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[gymsdk.environments]\n{ENVIRONMENT} = {shape_environment.__name__}\n")
    return site


def add_factors(result: BenchResult, shape: Shape, simple: BenchResult) -> BenchResult:
    """Return *result* with the factors of each load relative to the same load of *simple*."""
    loads = tuple(
        load.model_copy(update={"factors": _compute_factors(load, base, shape)})
        for load, base in zip(result.loads, simple.loads, strict=True)
    )
    return result.model_copy(update={"loads": loads})


def _compute_factors(load: LoadResult, base: LoadResult, shape: Shape) -> CostFactors:
    # At the offered rate of an open loop, every shape that keeps up has the same rate.
    is_closed = load.open_loop is None
    return CostFactors(
        cpu=_divide(_sum_server_cpu(load), _sum_server_cpu(base)),
        rate=_divide(base.rate, load.rate) if is_closed else None,
        reference=REFERENCE_FACTORS.get(str(shape)),
    )


def _sum_server_cpu(load: LoadResult) -> float:
    return sum(used for name, used in load.cpu.items() if name.startswith(SERVERS))


def _divide(dividend: float, divisor: float) -> float | None:
    return round(dividend / divisor, 2) if divisor else None
