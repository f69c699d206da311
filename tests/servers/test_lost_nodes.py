"""Lost nodes: which nodes the head reports as lost, and until when."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from gymsdk.edge.errors import RequestRejected

from .registrations import HERE, MATH, build_exit_registration, build_registration, build_service


def list_lost(registry):
    return [node.id for node in registry.lost_nodes]


def test_a_lost_node_is_remembered_for_a_while_until_it_returns_unlike_one_that_left(registry, clock):
    for name in "ab":
        registry.register(name, build_registration(build_service()), HERE)
    registry.leave("b")
    clock.now = 11.0
    assert list_lost(registry) == ["a"]
    registry.register("a", build_registration(MATH), HERE)
    assert list_lost(registry) == []
    clock.now = 611.0
    assert list_lost(registry) == ["a"]
    clock.now = 612.0
    assert list_lost(registry) == []


def test_a_lost_node_that_leaves_late_or_whose_exit_is_reported_is_forgotten(registry, clock):
    registry.register("a", build_registration(build_service(name="sums")), HERE)
    registry.register("child", build_registration(build_service(pid=7), supervisor="s"), HERE)
    clock.now = 11.0
    assert list_lost(registry) == ["a", "child"]
    registry.leave("a")
    registry.register("supervisor", build_exit_registration(), HERE)
    assert list_lost(registry) == []
    with pytest.raises(RequestRejected, match="has left"):
        registry.register("a", build_registration(MATH), HERE)


@pytest.mark.parametrize("when", [3.0, 11.0])
def test_a_node_is_lost_until_another_has_its_servers_however_soon(registry, clock, when):
    registry.register("a", build_registration(MATH), HERE)
    clock.now = when
    registry.register("b", build_registration(build_service()), "10.0.0.8")
    clock.now = 12.0
    assert (list_lost(registry), len(registry)) == ([], 1)


def test_a_node_is_lost_while_fewer_instances_exist_than_before(registry, clock):
    for name in "abc":
        registry.register(name, build_registration(build_service()), HERE)
    clock.now = 9.0
    registry.register("c", build_registration(build_service()), HERE)
    clock.now = 11.0
    assert list_lost(registry) == ["a", "b"]
    registry.register("d", build_registration(build_service()), HERE)
    assert len(list_lost(registry)) == 1
    registry.register("e", build_registration(build_service()), HERE)
    registry.leave("c")
    # Node c left by itself later, so no other node is lost.
    assert list_lost(registry) == []


def test_a_restarted_node_does_not_replace_a_lost_one(registry, clock):
    for name in "ab":
        registry.register(name, build_registration(build_service()), HERE)
    clock.now = 2.0
    registry.leave("b")
    clock.now = 3.0
    registry.register("c", build_registration(build_service()), HERE)
    clock.now = 11.0
    assert list_lost(registry) == ["a"]
    registry.register("d", build_registration(build_service()), HERE)
    assert list_lost(registry) == []


def test_of_two_lost_nodes_one_that_returns_does_not_replace_the_other(registry, clock):
    registry.register("a", build_registration(build_service()), HERE)
    clock.now = 1.0
    registry.register("b", build_registration(build_service()), HERE)
    clock.now = 2.0
    registry.register("a", build_registration(build_service()), HERE)
    clock.now = 11.5
    assert list_lost(registry) == ["b"]
    clock.now = 12.5
    assert list_lost(registry) == ["b", "a"]
    registry.register("a", build_registration(build_service()), HERE)
    assert list_lost(registry) == ["b"]


def test_a_node_that_shrank_is_lost_with_its_last_servers(registry, clock):
    registry.register("a", build_registration(MATH, build_service()), HERE)
    clock.now = 1.0
    registry.register("a", build_registration(MATH), HERE)
    clock.now = 12.0
    assert list_lost(registry) == ["a"]
    registry.register("b", build_registration(build_service()), HERE)
    assert list_lost(registry) == []


@asynccontextmanager
async def run(registry):
    up, over = asyncio.Event(), asyncio.Event()
    running = asyncio.ensure_future(registry.run(up, over))
    await up.wait()
    await asyncio.sleep(0)
    registry.register("a", build_registration(MATH), HERE)
    yield
    over.set()
    await running


async def test_no_node_is_lost_because_the_head_was_blocked(registry, clock):
    async with run(registry):
        clock.now = 30.0
        assert ([node.id for node in registry], list_lost(registry), registry.is_settled) == (["a"], [], False)
        clock.now = 31.9
        registry.register("b", build_registration(build_service(name="sums")), HERE)
    # A node that sends no report afterwards is lost.
    clock.now = 40.1
    assert ([node.id for node in registry], list_lost(registry), registry.is_settled) == (["b"], ["a"], True)


async def test_no_node_is_lost_while_the_head_is_too_busy_to_read_heartbeats(registry, clock):
    async with run(registry):
        # Each pass of the event loop takes three seconds; a heartbeat is read after four passes.
        for seconds in range(3, 16, 3):
            clock.now = float(seconds)
            assert ([node.id for node in registry], list_lost(registry)) == (["a"], [])
