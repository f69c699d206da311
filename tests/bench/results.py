"""Results of loads for tests that format or draw them."""

from __future__ import annotations

from typing import Any

from gymsdk.bench.report import BenchResult, Latency, LoadResult, LoopLag, Memory, OpenLoop, Traffic
from gymsdk.bench.stage import LOAD, SERVERS


def build_load(**changes: Any) -> LoadResult:
    load = LoadResult(
        environment="sums",
        concurrency=16,
        rollouts=200,
        seconds=2.0,
        rate=100.0,
        latency=Latency(p50=1.0, p90=2.0, p99=3.0, p999=4.0, mean=1.5, max=5.0),
        cpu={SERVERS: 2.0, LOAD: 0.5},
        cpu_share={SERVERS: 0.2, LOAD: 0.05},
        memory={SERVERS: Memory(before=80.0, half=90.0, after=85.0, most=95.0)},
        loop_lag={SERVERS: LoopLag(p50=0.5, p99=4.0, max=9.0), LOAD: LoopLag(p50=0.5, p99=1.0, max=2.0)},
        calls=1.0,
        requests={"sums_simple_agent": 1.0},
        traffic={"sums_simple_agent": Traffic(received=400.0, sent=1500.0)},
        stages={"queue": 0.1, "model": 0.9, "server": 0.3, "client": 0.2},
        reward=1.0,
        expected=1.0,
        wrong=0,
        failures={},
        messages={},
        open=0,
    )
    return load.model_copy(update=changes)


def build_open_load(rate: float, achieved: float, **changes: Any) -> LoadResult:
    fields = {"offered": rate, "keeps_up": achieved >= 0.95 * rate, "most": 20, "delayed": 0, "late_p99": 0.5}
    loop = OpenLoop(rate=rate, achieved=achieved, **{**fields, **changes})
    return build_load(open_loop=loop, rate=achieved, concurrency=4096)


def build_result(*loads: LoadResult, shape: str | None = None) -> BenchResult:
    return BenchResult(
        environment="sums",
        shape=shape,
        model="scripted/oracle",
        ready=1.0,
        ready_cpu=0.5,
        ready_memory=80.0,
        memory_measure="PSS",
        loads=loads,
    )
