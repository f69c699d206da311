"""Lost nodes: which nodes the head reports as lost, and until when."""

from __future__ import annotations

import asyncio

import pytest

from gymsdk.servers.app import RequestRejected

from .saying import HERE, MATH, another, ended, said


def test_a_lost_node_is_remembered_until_it_returns_unlike_one_that_left(members, clock):
    for name in "ab":
        members.put(name, said(another()), HERE)
    members.leave("b")
    clock.now = 11.0
    assert [each.id for each in members.lost] == ["a"]
    members.put("a", said(MATH), HERE)
    assert members.lost == []


def lost(members):
    return [each.id for each in members.lost]


def test_a_lost_node_that_leaves_late_is_forgotten_and_its_report_ignored(members, clock):
    members.put("a", said(MATH), HERE)
    clock.now = 11.0
    assert lost(members) == ["a"]
    members.leave("a")
    assert lost(members) == []
    with pytest.raises(RequestRejected, match="has left"):
        members.put("a", said(MATH), HERE)


@pytest.mark.parametrize("when", [3.0, 11.0])
def test_a_node_is_lost_until_another_has_its_servers_however_soon(members, clock, when):
    members.put("a", said(MATH), HERE)
    clock.now = when
    members.put("b", said(another()), "10.0.0.8")
    clock.now = 12.0
    assert (lost(members), len(members)) == ([], 1)


def test_a_node_is_lost_while_fewer_instances_exist_than_before(members, clock):
    for name in "abc":
        members.put(name, said(another()), HERE)
    clock.now = 9.0
    members.put("c", said(another()), HERE)
    clock.now = 11.0
    assert lost(members) == ["a", "b"]
    members.put("d", said(another()), HERE)
    assert len(lost(members)) == 1
    members.put("e", said(another()), HERE)
    members.leave("c")
    # That one left later is its own affair.
    assert lost(members) == []


def test_a_restarted_node_does_not_replace_a_lost_one(members, clock):
    for name in "ab":
        members.put(name, said(another()), HERE)
    clock.now = 2.0
    members.leave("b")
    clock.now = 3.0
    members.put("c", said(another()), HERE)
    clock.now = 11.0
    assert lost(members) == ["a"]
    members.put("d", said(another()), HERE)
    assert lost(members) == []


def test_of_two_lost_nodes_one_that_returns_does_not_replace_the_other(members, clock):
    members.put("a", said(another()), HERE)
    clock.now = 1.0
    members.put("b", said(another()), HERE)
    clock.now = 2.0
    members.put("a", said(another()), HERE)
    clock.now = 11.5
    assert lost(members) == ["b"]
    clock.now = 12.5
    assert lost(members) == ["b", "a"]
    members.put("a", said(another()), HERE)
    assert lost(members) == ["b"]


def test_a_node_that_shrank_is_lost_with_its_last_servers(members, clock):
    members.put("a", said(MATH, another()), HERE)
    clock.now = 1.0
    members.put("a", said(MATH), HERE)
    clock.now = 12.0
    assert lost(members) == ["a"]
    members.put("b", said(another()), HERE)
    assert lost(members) == []


def test_a_lost_node_is_remembered_for_a_while(members, clock):
    members.put("a", said(MATH), HERE)
    clock.now = 600.0
    assert lost(members) == ["a"]
    clock.now = 601.0
    assert lost(members) == []


async def test_no_node_is_lost_because_the_head_was_blocked(members, clock):
    up, over = asyncio.Event(), asyncio.Event()
    running = asyncio.ensure_future(members.run(up, over))
    await up.wait()
    await asyncio.sleep(0)
    members.put("a", said(MATH), HERE)
    clock.now = 30.0
    assert ([each.id for each in members], lost(members), members.settled) == (["a"], [], False)
    clock.now = 31.9
    members.put("b", said(another(name="sums")), HERE)
    over.set()
    await running
    # Who is not heard of after that is.
    clock.now = 40.1
    assert ([each.id for each in members], lost(members), members.settled) == (["b"], ["a"], True)


async def test_no_node_is_lost_while_the_head_is_too_busy_to_read_heartbeats(members, clock):
    up, over = asyncio.Event(), asyncio.Event()
    running = asyncio.ensure_future(members.run(up, over))
    await up.wait()
    await asyncio.sleep(0)
    members.put("a", said(MATH), HERE)
    # Each pass of the event loop takes three seconds; a heartbeat is read after four of them.
    for seconds in range(3, 16, 3):
        clock.now = float(seconds)
        assert ([each.id for each in members], lost(members)) == (["a"], [])
    over.set()
    await running


def test_a_lost_node_is_forgotten_once_its_supervisor_reports_its_exit(members, clock):
    members.put("child", said(another(pid=7), supervisor="s"), HERE)
    clock.now = 11.0
    assert [each.id for each in members.lost] == ["child"]
    members.put("supervisor", ended(), HERE)
    assert members.lost == []
