"""The nodes a head knows: each for its lease, none that contradicts another."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gymsdk.servers.app import RequestRejected
from gymsdk.servers.instances import build_shared_config, choose_services
from gymsdk.servers.registry import NodeRegistry, check_services
from gymsdk.servers.reports import Exit, Registration

from .saying import HERE, MATH, another, ended, said


def test_a_member_is_there_for_its_lease(members, clock):
    assert members.put("a", said(MATH), HERE) == 10.0
    clock.now = 10.0
    assert [each.name for each in members.services] == ["math"]
    clock.now = 10.1
    assert (members.services, len(members)) == ([], 0)


def test_who_left_before_it_was_known_does_not_come_back_late(members):
    members.leave("a")
    with pytest.raises(RequestRejected, match="has left"):
        members.put("a", said(MATH), HERE)


def test_only_so_many_that_left_are_remembered(clock):
    members = NodeRegistry(max_nodes=2, clock=clock)
    for name in "abc":
        members.leave(name)
    assert members.register("a", said(MATH), HERE) == 10.0
    with pytest.raises(RequestRejected, match="has left"):
        members.register("c", said(another()), HERE)


def test_a_member_that_is_heard_of_again_stays(members, clock):
    members.put("a", said(MATH), HERE)
    clock.now = 9.0
    members.put("a", said(MATH), HERE)
    clock.now = 18.0
    assert len(members) == 1


def test_a_node_may_ask_for_a_shorter_lease_and_for_no_longer_one(members):
    assert members.put("a", said(seconds=2.0), HERE) == 2.0
    assert members.put("b", said(seconds=2000.0), HERE) == 10.0


def test_what_has_left_is_gone_at_once_and_does_not_come_back_late(members):
    members.put("a", said(MATH), HERE)
    members.leave("a")
    members.leave("a")
    assert members.services == []
    with pytest.raises(RequestRejected, match="node 'a' has left"):
        members.put("a", said(MATH), HERE)


def test_a_second_node_under_a_name_is_another_instance(members):
    members.put("a", said(MATH), HERE)
    members.put("b", said(another()), HERE)
    assert [each.name for each in members.services] == ["math", "math"]
    assert len({each.id for each in members.services}) == 2


@pytest.mark.parametrize("other", [{"implementation": "sums"}, {"kind": "responses_api_models"}])
def test_a_name_that_contradicts_another_is_refused_in_a_sentence(members, other):
    members.put("a", said(MATH), HERE)
    with pytest.raises(
        RequestRejected, match=r"'math' is resources_servers/math at this head and cannot be .*; choose another name"
    ):
        members.put("b", said(another(**other)), HERE)
    assert len(members) == 1


def test_a_name_that_contradicts_one_of_the_heads_own_is_refused(clock):
    with pytest.raises(RequestRejected, match="'math' is"):
        NodeRegistry([MATH], clock=clock).register("b", said(another(implementation="sums")), HERE)


@pytest.mark.parametrize("name", ["head_server", "policy_model_name"])
def test_a_server_may_not_be_called_like_a_key_of_the_configuration(name):
    with pytest.raises(RequestRejected, match="a key of the configuration"):
        NodeRegistry(taken=["policy_model_name"]).register("a", said(another(name=name)), HERE)


def test_a_node_may_change_what_it_has(members):
    members.put("a", said(MATH), HERE)
    members.put("a", said(another(implementation="sums")), HERE)
    assert [each.implementation for each in members.services] == ["sums"]


@pytest.mark.parametrize(
    ("host", "address", "reached"),
    [
        ("0.0.0.0", "10.0.0.7", "10.0.0.7"),
        ("::", "::ffff:10.0.0.7", "10.0.0.7"),
        ("0.0.0.0", "127.0.0.1", "0.0.0.0"),
        ("node-7", "10.0.0.7", "node-7"),
        ("0.0.0.0", "nonsense", "0.0.0.0"),
    ],
)
def test_a_node_that_does_not_say_where_it_is_is_where_it_asks_from(members, host, address, reached):
    members.put("a", said(another(host=host)), address)
    assert [each.host for each in members.services] == [reached]


def test_there_are_no_more_than_there_is_place_for(clock):
    members = NodeRegistry(max_nodes=1, clock=clock)
    members.register("a", said(), HERE)
    members.register("a", said(), HERE)
    with pytest.raises(RequestRejected, match="this head already has 1 nodes"):
        members.register("b", said(), HERE)


def test_it_is_settled_once_those_before_it_had_time_to_come(members, clock):
    assert not members.settled
    clock.now = 10.0
    assert members.settled


def test_what_is_expected_and_what_ended_is_told_by_whoever_knows(members):
    ended = {"math": Exit(code=-9, at=1.0, restarts=2)}
    members.put("a", said(expected=["math", "tool_call"], exits=ended), HERE)
    members.put("b", said(MATH, expected=["math"]), HERE)
    assert (members.expected, members.exits) == (["math", "tool_call"], ended)


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [{"a": value}]
    return value


@pytest.mark.parametrize(
    "wrong",
    [
        {"services": [MATH.model_dump() | {"port": 0}]},
        {"services": [MATH.model_dump() | {"host": "a b/"}]},
        {"services": [MATH.model_dump() | {"kind": "coffee"}]},
        {"services": [MATH.model_dump() | {"id": "guessed"}]},
        {"services": [MATH.model_dump() | {"name": ""}]},
        {"services": [MATH.model_dump()] * 1001},
        {"services": [MATH.model_dump() | {"fields": {"a": nested(400)}}]},
        {"services": [MATH.model_dump() | {"fields": {"a": "x" * 20000}}]},
        {"loads": {"math": {"sessions": -1}}},
        {"seconds": 0},
        {"seconds": float("nan")},
    ],
)
def test_what_is_no_registration_is_refused(wrong):
    with pytest.raises(ValidationError):
        Registration.model_validate(wrong)


def test_the_oldest_that_answers_stands_for_all_of_a_name():
    old, young, new = another(started=1.0), another(started=2.0), another(started=3.0)
    assert choose_services([new, old, young], {})["math"] is old
    assert choose_services([new, old, young], {old.id: "timeout", young.id: "success"})["math"] is young
    assert choose_services([new, old], {old.id: "timeout", new.id: "connection_error"})["math"] is old
    assert choose_services([new, old], {}, draining={old.id})["math"] is new


def test_the_configuration_says_where_tasks_are_sent_and_what_the_model_is():
    its = {"resources_server": {"type": "resources_servers", "name": "math"}}
    server = another(name="math_server", kind="environment_servers", fields=its)
    model = another(name="policy_model", kind="responses_api_models", fields={"model": "openai/x"})
    assert build_shared_config([MATH, server, model]) == {
        "environment_server_routes": {"math": "math_server"},
        "policy_model_name": "openai/x",
    }


def test_a_node_whose_process_ended_is_gone_as_soon_as_its_supervisor_says_so(members):
    members.put("child", said(another(pid=7), supervisor="s"), HERE)
    members.put("supervisor", ended(), HERE)
    # That it ended is told of by itself: it is not lost.
    assert (members.services, members.lost) == ([], [])
    # What it said last may come late.
    with pytest.raises(RequestRejected, match="has left"):
        members.put("child", said(another(pid=7), supervisor="s"), HERE)
    assert members.services == []


@pytest.mark.parametrize(
    ("service", "supervisor"),
    [({"pid": 8}, "s"), ({"pid": 7, "started": 6.5}, "s"), ({"pid": 7, "name": "sums"}, "s"), ({"pid": 7}, "other")],
)
def test_the_end_of_one_process_is_not_that_of_another(members, service, supervisor):
    members.put("child", said(another(**service), supervisor=supervisor), HERE)
    members.put("supervisor", ended(), HERE)
    assert len(members.services) == 1


def test_what_comes_late_of_a_process_that_ended_is_refused_whoever_was_heard_first(members):
    members.put("supervisor", ended(), HERE)
    with pytest.raises(RequestRejected, match="the process of node 'child' has ended") as caught:
        members.put("child", said(another(pid=7), supervisor="s"), HERE)
    assert (caught.value.status, members.services, members.restarting("child")) == (410, [], [])


def test_how_a_server_ended_wrongly_is_not_hidden_by_another_of_its_name(members):
    wrong, older = Exit(code=-9, at=9.0, pid=1), Exit(code=1, at=8.0, pid=1)
    for name, one in (("r", older), ("s", wrong), ("t", Exit(code=0, at=10.0, pid=1))):
        members.put(name, said(exits={"math": one}, supervisor=name), HERE)
    assert members.exits == {"math": wrong}


def test_two_nodes_do_not_have_the_same_instance(members):
    members.put("a", said(MATH), HERE)
    members.put("a", said(MATH), HERE)
    with pytest.raises(RequestRejected, match=r"the id .* of 'math' belongs to another instance") as caught:
        members.put("b", said(MATH), HERE)
    assert caught.value.status == 409
    members.put("b", said(another()), HERE)
    members.leave("a")
    members.put("c", said(MATH), HERE)
    with pytest.raises(RequestRejected, match="another instance's"):
        members.put("d", said(one := another(), one.model_copy()), HERE)


def test_what_only_its_own_machine_reaches_is_taken_in_from_there_alone():
    near = MATH.model_copy(update={"host": "127.0.0.1"})
    for address, own in (("127.0.0.1", "127.0.0.1"), ("::ffff:127.0.0.1", "::"), ("::1", "::1"), (HERE, HERE)):
        check_services([near], address, head_address=own, scheme="http")
    check_services([MATH.model_copy(update={"host": "0.0.0.0"})], HERE, head_address="10.0.0.1", scheme="http")
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(
            RequestRejected, match=r"'math' listens at .*10\.0\.0\.7.*--host 0\.0\.0\.0.*--advertise-host"
        ) as caught:
            check_services([MATH.model_copy(update={"host": host})], HERE, head_address="10.0.0.1", scheme="http")
        assert caught.value.status == 422


def test_a_head_that_speaks_tls_takes_in_nothing_that_does_not():
    check_services([MATH.model_copy(update={"scheme": "https"})], "127.0.0.1", head_address="127.0.0.1", scheme="https")
    with pytest.raises(RequestRejected, match="in the clear; serve it with --tls-cert and --tls-key"):
        check_services([MATH], "127.0.0.1", head_address="127.0.0.1", scheme="https")
