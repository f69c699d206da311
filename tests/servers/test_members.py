"""The nodes a head knows: each for its lease, none that contradicts another."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gymsdk.servers.app import Refused
from gymsdk.servers.nodes.admission import check
from gymsdk.servers.nodes.choice import first, told
from gymsdk.servers.nodes.members import Members
from gymsdk.servers.nodes.reports import Exit, Registration
from gymsdk.servers.nodes.service import Service

MATH = Service(name="math", kind="resources_servers", implementation="math", port=1, started=5.0)
HERE = "10.0.0.7"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def members(clock):
    return Members(lease=10.0, clock=clock)


def said(*services, **fields):
    return Registration(services=list(services), **fields)


def another(service=MATH, **fields):
    return Service.model_validate(service.model_dump(exclude={"id"}) | fields)


def test_a_member_is_there_for_its_lease(members, clock):
    assert members.put("a", said(MATH), HERE) == 10.0
    clock.now = 10.0
    assert [each.name for each in members.services] == ["math"]
    clock.now = 10.1
    assert (members.services, len(members)) == ([], 0)


def test_a_node_that_is_lost_is_remembered_until_it_is_back_and_one_that_left_is_not(members, clock):
    for name in "ab":
        members.put(name, said(another()), HERE)
    members.leave("b")
    clock.now = 11.0
    assert [each.id for each in members.lost] == ["a"]
    members.put("a", said(MATH), HERE)
    assert members.lost == []


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
    with pytest.raises(Refused, match="node 'a' has left"):
        members.put("a", said(MATH), HERE)


def test_a_second_node_under_a_name_is_another_instance(members):
    members.put("a", said(MATH), HERE)
    members.put("b", said(another()), HERE)
    assert [each.name for each in members.services] == ["math", "math"]
    assert len({each.id for each in members.services}) == 2


@pytest.mark.parametrize("other", [{"implementation": "sums"}, {"kind": "responses_api_models"}])
def test_a_name_that_contradicts_another_is_refused_in_a_sentence(members, other):
    members.put("a", said(MATH), HERE)
    with pytest.raises(Refused, match=r"'math' is resources_servers/math here, and cannot be .*; give it another name"):
        members.put("b", said(another(**other)), HERE)
    assert len(members) == 1


def test_a_name_that_contradicts_one_of_the_heads_own_is_refused(clock):
    with pytest.raises(Refused, match="'math' is"):
        Members([MATH], clock=clock).put("b", said(another(implementation="sums")), HERE)


@pytest.mark.parametrize("name", ["head_server", "policy_model_name"])
def test_a_server_may_not_be_called_like_a_key_of_the_configuration(name):
    with pytest.raises(Refused, match="a key of the configuration"):
        Members(taken=["policy_model_name"]).put("a", said(another(name=name)), HERE)


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
    members = Members(most=1, clock=clock)
    members.put("a", said(), HERE)
    members.put("a", said(), HERE)
    with pytest.raises(Refused, match="this head has 1 nodes by now"):
        members.put("b", said(), HERE)


def test_it_is_settled_once_those_before_it_had_time_to_come(members, clock):
    assert not members.settled
    clock.now = 10.0
    assert members.settled


def test_what_is_expected_and_what_ended_is_told_by_whoever_knows(members):
    ended = {"math": Exit(code=-9, at=1.0, restarts=2)}
    members.put("a", said(expected=["math", "tool_call"], exits=ended), HERE)
    members.put("b", said(MATH, expected=["math"]), HERE)
    assert (members.expected, members.exits) == (["math", "tool_call"], ended)


@pytest.mark.parametrize(
    "wrong",
    [
        {"services": [MATH.model_dump() | {"port": 0}]},
        {"services": [MATH.model_dump() | {"host": "a b/"}]},
        {"services": [MATH.model_dump() | {"kind": "coffee"}]},
        {"services": [MATH.model_dump() | {"id": "guessed"}]},
        {"services": [MATH.model_dump() | {"name": ""}]},
        {"services": [MATH.model_dump()] * 1001},
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
    assert first([new, old, young], {})["math"] is old
    assert first([new, old, young], {old.id: "timeout", young.id: "success"})["math"] is young
    assert first([new, old], {old.id: "timeout", new.id: "connection_error"})["math"] is old
    assert first([new, old], {}, draining={old.id})["math"] is new


def test_the_configuration_says_where_tasks_are_sent_and_what_the_model_is():
    its = {"resources_server": {"type": "resources_servers", "name": "math"}}
    server = another(name="math_server", kind="environment_servers", fields=its)
    model = another(name="policy_model", kind="responses_api_models", fields={"model": "openai/x"})
    assert told([MATH, server, model]) == {
        "environment_server_routes": {"math": "math_server"},
        "policy_model_name": "openai/x",
    }


def supervised(members, sessions):
    math = another(pid=7)
    members.put("child", said(math, loads={"math": {"sessions": sessions}}), HERE)
    members.put("supervisor", said(expected=["math"], restarts={"math": 7}), HERE)
    return math


def test_a_server_without_sessions_is_restarted_when_its_supervisor_is_next_heard_of(members):
    supervised(members, 0)
    assert members.restart("math", 30) == [7]
    assert (members.restarting("child"), members.restarting("supervisor")) == ([], ["math"])
    assert members.restarting("supervisor") == []


def test_a_server_with_sessions_is_given_nothing_new_until_they_have_ended(members):
    math = supervised(members, 1)
    members.restart("math", 30)
    assert (members.restarting("supervisor"), members.draining) == ([], {math.id})
    members.put("supervisor", said(restarts={"math": 7}), HERE)
    members.put("child", said(math, loads={"math": {"sessions": 0}}), HERE)
    assert (members.restarting("supervisor"), members.draining) == (["math"], set())


def test_sessions_that_last_are_waited_for_within_a_bound(members, clock):
    math = supervised(members, 1)
    members.restart("math", 5)
    assert (members.restarting("supervisor"), members.draining) == ([], {math.id})
    clock.now = 5.0
    assert members.restarting("supervisor") == ["math"]


def test_another_process_than_was_asked_for_is_not_restarted(members):
    supervised(members, 0)
    members.restart("math", 30)
    members.put("supervisor", said(restarts={"math": 8}), HERE)
    assert (members.restarting("supervisor"), members.draining) == ([], set())


def ended(pid=7, at=6.0):
    return said(exits={"math": Exit(code=-9, at=at, pid=pid)}, supervisor="s")


def test_a_node_whose_process_ended_is_gone_as_soon_as_its_supervisor_says_so(members):
    members.put("child", said(another(pid=7), supervisor="s"), HERE)
    members.put("supervisor", ended(), HERE)
    # That it ended is told of by itself: it is not lost.
    assert (members.services, members.lost) == ([], [])
    # What it said last may come late.
    with pytest.raises(Refused, match="has left"):
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


def test_who_has_no_supervisor_cannot_be_restarted(members):
    members.put("child", said(MATH), HERE)
    with pytest.raises(Refused, match="serve it with --separate"):
        members.restart("math")
    with pytest.raises(Refused, match="no server 'mth'; did you mean 'math'"):
        members.restart("mth")


def test_two_nodes_do_not_have_the_same_instance(members):
    members.put("a", said(MATH), HERE)
    members.put("a", said(MATH), HERE)
    with pytest.raises(Refused, match=r"the id .* of 'math' is another instance's") as caught:
        members.put("b", said(MATH), HERE)
    assert caught.value.status == 409
    members.put("b", said(another()), HERE)
    members.leave("a")
    members.put("c", said(MATH), HERE)
    with pytest.raises(Refused, match="another instance's"):
        members.put("d", said(one := another(), one.model_copy()), HERE)


def test_what_only_its_own_machine_reaches_is_taken_in_from_there_alone():
    near = MATH.model_copy(update={"host": "127.0.0.1"})
    for address, own in (("127.0.0.1", "127.0.0.1"), ("::ffff:127.0.0.1", "::"), ("::1", "::1"), (HERE, HERE)):
        check([near], address, own=own, scheme="http")
    check([MATH.model_copy(update={"host": "0.0.0.0"})], HERE, own="10.0.0.1", scheme="http")
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(
            Refused, match=r"'math' listens at .*10\.0\.0\.7.*--host 0\.0\.0\.0.*--advertise-host"
        ) as caught:
            check([MATH.model_copy(update={"host": host})], HERE, own="10.0.0.1", scheme="http")
        assert caught.value.status == 422


def test_a_head_that_speaks_tls_takes_in_nothing_that_does_not():
    check([MATH.model_copy(update={"scheme": "https"})], "127.0.0.1", own="127.0.0.1", scheme="https")
    with pytest.raises(Refused, match="in the clear; serve it with --tls-cert and --tls-key"):
        check([MATH], "127.0.0.1", own="127.0.0.1", scheme="https")
