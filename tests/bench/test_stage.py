"""The labels of the processes that a benchmark measures."""

from __future__ import annotations

from gymsdk.bench.stage import SERVERS, label_processes
from gymsdk.cluster.reports import Instance


def build_instance(name: str, pid: int, process: str = "") -> Instance:
    fields = {"kind": "resources_servers", "implementation": name, "url": "http://127.0.0.1:1"}
    return Instance(id=f"{name}@{pid}", name=name, pid=pid, process=process, **fields)


def test_a_single_process_is_labelled_as_the_servers() -> None:
    assert label_processes([build_instance("math", 7), build_instance("policy_model", 7)]) == {SERVERS: 7}


def test_each_worker_has_its_own_name() -> None:
    instances = [
        build_instance(name, pid, process)
        for pid, process in ((9, "worker-10"), (8, "worker-2"), (7, "worker-1"))
        for name in ("math", "policy_model")
    ]
    assert list(label_processes(instances).items()) == [("worker-1", 7), ("worker-2", 8), ("worker-10", 9)]


def test_servers_in_processes_of_their_own_have_their_names() -> None:
    assert label_processes([build_instance("math", 7), build_instance("policy_model", 8)]) == {
        "math": 7,
        "policy_model": 8,
    }


def test_processes_with_the_same_name_are_told_apart() -> None:
    instances = [build_instance("math", 7), build_instance("math", 8), build_instance("policy_model", 9)]
    assert label_processes(instances) == {"math (process 7)": 7, "math (process 8)": 8, "policy_model": 9}
