"""Restarts: which supervisor restarts which server, when, and in which order."""

from __future__ import annotations

import pytest

from gymsdk.servers.app import RequestRejected

from .saying import HERE, MATH, another, said


def child(members, supervisor="s", *, pid=7, sessions=0):
    math = another(pid=pid)
    members.put(f"{supervisor}-{pid}", said(math, loads={"math": {"sessions": sessions}}, supervisor=supervisor), HERE)
    return math


def supervising(members, supervisor="s", *, pid=7):
    members.put(supervisor, said(expected=["math"], restarts={"math": pid}, supervisor=supervisor), HERE)


def supervised(members, supervisor="s", *, sessions=0):
    math = child(members, supervisor, sessions=sessions)
    supervising(members, supervisor)
    return math


def test_a_server_without_sessions_restarts_at_its_supervisors_next_report(members):
    math = supervised(members)
    assert [(each.pid, each.instances) for each in members.restart("math", 30)] == [(7, (math.id,))]
    assert (members.restarting("s-7"), members.restarting("s")) == ([], ["math"])


def test_a_restart_is_ordered_until_it_is_confirmed(members):
    math = supervised(members)
    members.restart("math", 30)
    for _ in range(2):
        assert (members.restarting("s"), members.draining) == (["math"], {math.id})
    members.leave("s-7")
    child(members, pid=8)
    supervising(members, pid=8)
    assert (members.restarting("s"), members.draining) == ([], set())


def test_a_server_with_sessions_gets_no_new_work_until_they_end(members):
    math = supervised(members, sessions=1)
    members.restart("math", 30)
    assert (members.restarting("s"), members.draining) == ([], {math.id})
    supervising(members)
    members.put("s-7", said(math, loads={"math": {"sessions": 0}}, supervisor="s"), HERE)
    assert (members.restarting("s"), members.draining) == (["math"], {math.id})


def test_the_wait_for_long_sessions_is_bounded(members, clock):
    math = supervised(members, sessions=1)
    members.restart("math", 5)
    assert (members.restarting("s"), members.draining) == ([], {math.id})
    clock.now = 5.0
    assert members.restarting("s") == ["math"]


def test_only_the_process_of_the_order_is_restarted(members):
    supervised(members)
    members.restart("math", 30)
    supervising(members, pid=8)
    assert members.restarting("s") == []


def test_processes_of_two_machines_may_have_the_same_id(members):
    math = supervised(members)
    members.put("b", said(another(pid=7), loads={"math": {"sessions": 5}}), "10.0.0.8")
    members.restart("math", 30)
    assert (members.restarting("s"), members.draining) == (["math"], {math.id})


def test_the_instances_of_a_name_restart_one_after_another(members, clock):
    one, other = supervised(members, "s"), supervised(members, "t", sessions=1)
    assert len(members.restart("math", 30)) == 2
    assert (members.restarting("s"), members.restarting("t"), members.draining) == (["math"], [], {one.id})
    clock.now = 9.0
    members.leave("s-7")
    supervising(members, pid=8)
    # It runs again, and does not answer yet.
    assert (members.restarting("s"), members.restarting("t"), members.draining) == ([], [], set())
    child(members, "s", pid=8)
    assert (members.restarting("s"), members.restarting("t"), members.draining) == ([], [], {other.id})
    for now in (9.0, 18.0, 27.0, 36.0):
        clock.now = now
        child(members, "t", sessions=1)
        supervising(members, "t")
    # Its sessions had their time from its turn on.
    assert members.restarting("t") == []
    clock.now = 39.0
    assert members.restarting("t") == ["math"]


def test_the_other_restarts_are_dropped_if_the_first_does_not_return_in_time(members, clock, caplog):
    supervised(members, "s")
    other = supervised(members, "t")
    members.restart("math", 30)
    assert members.restarting("s") == ["math"]
    members.leave("s-7")
    for now in range(0, 630, 9):
        clock.now = float(now)
        supervising(members, pid=8 + now)
        child(members, "t")
        supervising(members, "t")
        assert (members.restarting("t"), members.draining, caplog.messages) == ([], set(), [])
    clock.now = 630.0
    supervising(members, pid=1000)
    assert (members.restarting("s"), members.restarting("t"), members.draining) == ([], [], set())
    assert ["the restart of 'math' is given up" in each for each in caplog.messages] == [True]
    # It is mended long after.
    child(members, "s", pid=1000)
    assert (members.restarting("t"), members.draining) == ([], set())
    members.restart("math", 30)
    assert members.restarting("s") == ["math"]
    assert other.id not in members.draining


def test_a_server_without_a_supervisor_cannot_be_restarted(members):
    members.put("child", said(MATH), HERE)
    with pytest.raises(RequestRejected, match="serve it with --separate"):
        members.restart("math")
    with pytest.raises(RequestRejected, match="no server 'mth'; did you mean 'math'"):
        members.restart("mth")
