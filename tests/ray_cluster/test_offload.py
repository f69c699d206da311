"""Offloaded functions run as Ray tasks, end as on one machine, and survive the loss of a node."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gymsdk.errors import BudgetSpent, GymsdkError, UsageError, WorkerLost
from gymsdk.ray.cluster import connect
from gymsdk.ray.executor import RayExecutor
from gymsdk.workers.offload import use_executor

from . import functions

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


async def gather(*calls: Any) -> list[Any]:
    with use_executor(RayExecutor()):
        return await asyncio.gather(*calls, return_exceptions=True)


def test_calls_end_as_on_one_machine_and_the_own_cluster_ends_with_the_context(tmp_path: Path) -> None:
    with connect("local") as cluster:
        assert cluster.is_own
        with use_executor(RayExecutor()):

            async def call_all() -> list[Any]:
                squares = [functions.square(number) for number in range(500)]
                rest = [functions.fail("lost"), functions.burn(), functions.hang(), functions.exit_now()]
                return await asyncio.gather(*squares, *rest, return_exceptions=True)

            *squares, failed, burned, hung, exited = asyncio.run(call_all())
    assert squares == [number * number for number in range(500)]
    assert (type(failed), failed.args) == (LookupError, ("lost",))
    assert (type(burned), burned.kind) == (BudgetSpent, "cpu_spent")
    assert (type(hung), hung.kind, hung.retryable) == (WorkerLost, "worker_timeout", True)
    assert (type(exited), exited.kind) == (WorkerLost, "worker_killed")
    with pytest.raises(GymsdkError, match="no Ray cluster answers at"), connect(cluster.address):
        pass


@pytest.mark.parametrize("address", ["here", "ray://host", "http://host:1", "user@host:1", ""])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a Ray cluster"), connect(address):
        pass


def test_auto_without_a_cluster_starts_none() -> None:
    with pytest.raises(GymsdkError, match="no Ray cluster runs on this machine"), connect("auto"):
        pass


@pytest.mark.slow
def test_the_gradings_of_a_lost_node_finish_elsewhere_and_count_once(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished: dict[int, list[float]] = {}

    async def grade(number: int) -> None:
        result, _ = await functions.grade(str(tmp_path), number)
        finished.setdefault(result, []).append(time.monotonic())

    async def run() -> float:
        with use_executor(RayExecutor()):
            # The workers are warm before the node is lost.
            await asyncio.gather(*(functions.square(number) for number in range(100)))
            grading = asyncio.gather(*(grade(number) for number in range(1000)))
            while len(finished) < 200:  # noqa: ASYNC110 - the gradings have no event for their progress
                await asyncio.sleep(0.01)
            lost_at = time.monotonic()
            await asyncio.to_thread(cluster.remove_node, cluster.worker_nodes.copy().pop(), allow_graceful=False)
            await grading
            return lost_at

    with connect(cluster.address) as joined:
        assert not joined.is_own
        lost_at = asyncio.run(run())
    assert sorted(finished) == [*range(1000)]
    assert {len(times) for times in finished.values()} == {1}
    executions = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert len(set(executions)) == 1000
    recovered = max(moment for [moment] in finished.values()) - lost_at
    with capsys.disabled():
        sys.stdout.write(
            f"\n1000 gradings, a node of 3 lost: all finished {recovered:.1f} s later, {len(executions)} executions\n"
        )


@pytest.mark.slow
def test_the_tasks_spread_over_the_nodes(cluster: Any, tmp_path: Path) -> None:
    with connect(cluster.address):
        nodes = {node for _, node in asyncio.run(gather(*(functions.grade(str(tmp_path), n) for n in range(300))))}
    assert len(nodes) == 3
