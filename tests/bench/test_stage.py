"""The labels of the processes that a benchmark measures."""

from __future__ import annotations

import pytest

from gymsdk.bench.stage import SERVERS, label_processes
from gymsdk.cluster.reports import Instance


def build_instance(name: str, pid: int, process: str = "") -> Instance:
    fields = {"kind": "resources_servers", "implementation": name, "url": "http://127.0.0.1:1"}
    return Instance(id=f"{name}@{pid}", name=name, pid=pid, process=process, **fields)


@pytest.mark.parametrize(
    ("processes", "labels"),
    [
        ({"math": [7], "policy_model": [7]}, {SERVERS: 7}),
        ({"math": [7], "policy_model": [8]}, {"math": 7, "policy_model": 8}),
        (
            {"math": [7, 8], "policy_model": [9]},
            {"math (process 7)": 7, "math (process 8)": 8, "policy_model": 9},
        ),
    ],
)
def test_processes_are_labelled_by_their_servers(processes: dict[str, list[int]], labels: dict[str, int]) -> None:
    assert label_processes([build_instance(name, pid) for name in processes for pid in processes[name]]) == labels


def test_each_worker_has_its_own_name() -> None:
    instances = [
        build_instance(name, pid, process)
        for pid, process in ((9, "worker-10"), (8, "worker-2"), (7, "worker-1"))
        for name in ("math", "policy_model")
    ]
    assert list(label_processes(instances).items()) == [("worker-1", 7), ("worker-2", 8), ("worker-10", 9)]
