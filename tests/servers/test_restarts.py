"""Restarts: which supervisor restarts which server, when, and in which order."""

from __future__ import annotations

import pytest

from gymsdk.edge.errors import RequestRejected

from .registrations import HERE, MATH, build_registration, build_service


def register_child(registry, supervisor="s", *, pid=7, sessions=0):
    math = build_service(pid=pid)
    registry.register(
        f"{supervisor}-{pid}",
        build_registration(math, loads={"math": {"sessions": sessions}}, supervisor=supervisor),
        HERE,
    )
    return math


def register_supervisor(registry, supervisor="s", *, pid=7):
    registry.register(
        supervisor, build_registration(expected=["math"], restarts={"math": pid}, supervisor=supervisor), HERE
    )


def register_both(registry, supervisor="s", *, sessions=0):
    math = register_child(registry, supervisor, sessions=sessions)
    register_supervisor(registry, supervisor)
    return math


def test_a_server_without_sessions_restarts_at_its_supervisors_next_report(registry):
    math = register_both(registry)
    assert [(each.pid, each.instances) for each in registry.restart("math", 30)] == [(7, (math.id,))]
    assert (registry.due_restarts("s-7"), registry.due_restarts("s")) == ([], ["math"])


def test_a_restart_is_ordered_until_it_is_confirmed(registry):
    math = register_both(registry)
    registry.restart("math", 30)
    for _ in range(2):
        assert (registry.due_restarts("s"), registry.draining_instances) == (["math"], {math.id})
    registry.leave("s-7")
    register_child(registry, pid=8)
    register_supervisor(registry, pid=8)
    assert (registry.due_restarts("s"), registry.draining_instances) == ([], set())


def test_a_server_with_sessions_gets_no_new_work_until_they_end(registry):
    math = register_both(registry, sessions=1)
    registry.restart("math", 30)
    assert (registry.due_restarts("s"), registry.draining_instances) == ([], {math.id})
    register_supervisor(registry)
    registry.register("s-7", build_registration(math, loads={"math": {"sessions": 0}}, supervisor="s"), HERE)
    assert (registry.due_restarts("s"), registry.draining_instances) == (["math"], {math.id})


def test_the_wait_for_long_sessions_is_bounded(registry, clock):
    math = register_both(registry, sessions=1)
    registry.restart("math", 5)
    assert (registry.due_restarts("s"), registry.draining_instances) == ([], {math.id})
    clock.now = 5.0
    assert registry.due_restarts("s") == ["math"]


def test_only_the_process_of_the_order_is_restarted(registry):
    register_both(registry)
    registry.restart("math", 30)
    register_supervisor(registry, pid=8)
    assert registry.due_restarts("s") == []


def test_processes_of_two_machines_may_have_the_same_id(registry):
    math = register_both(registry)
    registry.register("b", build_registration(build_service(pid=7), loads={"math": {"sessions": 5}}), "10.0.0.8")
    registry.restart("math", 30)
    assert (registry.due_restarts("s"), registry.draining_instances) == (["math"], {math.id})


def test_the_instances_of_a_name_restart_one_after_another(registry, clock):
    one, other = register_both(registry, "s"), register_both(registry, "t", sessions=1)
    assert len(registry.restart("math", 30)) == 2
    assert (registry.due_restarts("s"), registry.due_restarts("t"), registry.draining_instances) == (
        ["math"],
        [],
        {one.id},
    )
    clock.now = 9.0
    registry.leave("s-7")
    register_supervisor(registry, pid=8)
    # The process runs again, but its server does not answer yet.
    assert (registry.due_restarts("s"), registry.due_restarts("t"), registry.draining_instances) == ([], [], set())
    register_child(registry, "s", pid=8)
    assert (registry.due_restarts("s"), registry.due_restarts("t"), registry.draining_instances) == ([], [], {other.id})
    for now in (9.0, 18.0, 27.0, 36.0):
        clock.now = now
        register_child(registry, "t", sessions=1)
        register_supervisor(registry, "t")
    # The time limit for its sessions starts with its turn.
    assert registry.due_restarts("t") == []
    clock.now = 39.0
    assert registry.due_restarts("t") == ["math"]


def test_the_other_restarts_are_dropped_if_the_first_does_not_return_in_time(registry, clock, caplog):
    register_both(registry, "s")
    other = register_both(registry, "t")
    registry.restart("math", 30)
    assert registry.due_restarts("s") == ["math"]
    registry.leave("s-7")
    for now in range(0, 630, 9):
        clock.now = float(now)
        register_supervisor(registry, pid=8 + now)
        register_child(registry, "t")
        register_supervisor(registry, "t")
        assert (registry.due_restarts("t"), registry.draining_instances, caplog.messages) == ([], set(), [])
    clock.now = 630.0
    register_supervisor(registry, pid=1000)
    assert (registry.due_restarts("s"), registry.due_restarts("t"), registry.draining_instances) == ([], [], set())
    assert ["the restart of 'math' is given up" in each for each in caplog.messages] == [True]
    # The server answers again long afterwards.
    register_child(registry, "s", pid=1000)
    assert (registry.due_restarts("t"), registry.draining_instances) == ([], set())
    registry.restart("math", 30)
    assert registry.due_restarts("s") == ["math"]
    assert other.id not in registry.draining_instances


def test_a_server_without_a_supervisor_cannot_be_restarted(registry):
    registry.register("child", build_registration(MATH), HERE)
    with pytest.raises(RequestRejected, match="serve it with --separate"):
        registry.restart("math")
    with pytest.raises(RequestRejected, match="unknown server 'mth'; did you mean 'math'"):
        registry.restart("mth")
