"""Build the complete list of servers of a deployment: configured, derived and missing servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gymsdk import UsageError
from gymsdk.cli.deployment import build_deployment
from gymsdk.cluster.reports import MAX_ENTRIES, Service
from gymsdk.config.model import AgentServerConfig, Deployment, ModelServerConfig, ServerConfig
from gymsdk.config.yaml import Place
from gymsdk.deploy import plan, process
from gymsdk.deploy.child import HEAD_SERVER
from gymsdk.edge.addresses import bind_socket
from gymsdk.edge.auth import NO_SECURITY

PLAYER = ModelServerConfig(name="scripted/oracle")
MATH = ["math", "math_simple_agent", "math_environment_server"]


def names(blocks: tuple[ServerConfig, ...]) -> list[str]:
    return [block.name for block in blocks]


def service(name: str, kind: str, **refers: str) -> Service:
    kinds = {"resources_server": "resources_servers", "agent_server": "responses_api_agents"}
    fields = {key: {"type": kinds[key], "name": its} for key, its in refers.items()}
    told: dict[str, Any] = {"name": name, "kind": kind, "implementation": name, "fields": fields}
    return Service.model_validate(told)


def test_each_environment_gets_an_agent_and_an_environment_server() -> None:
    found = plan.complete_servers(
        Deployment(), plan.build_resources_server("math"), plan.build_resources_server("lamp"), policy_model=PLAYER
    )
    assert names(found) == [*MATH, "lamp", "lamp_simple_agent", "lamp_environment_server", "policy_model"]


def test_a_configured_agent_replaces_the_default_agent_and_keeps_its_references() -> None:
    refers = {"resources_server": "math", "model_server": "big"}
    mine = ServerConfig(
        name="mine",
        kind="responses_api_agents",
        implementation="simple_agent",
        kind_settings=AgentServerConfig(),
        refers=refers,
    )
    found = plan.complete_servers(Deployment(servers=(mine,)), plan.build_resources_server("math"))
    assert names(found) == ["math", "mine", "mine_environment_server"]
    assert found[2].refers["model_server"] == "big"


def test_agents_without_a_model_use_the_only_model() -> None:
    big = plan.build_model_server(PLAYER).model_copy(update={"name": "big"})
    found = plan.complete_servers(Deployment(servers=(big,)), plan.build_resources_server("math"))
    assert next(block for block in found if block.name == "math_simple_agent").refers["model_server"] == "big"


@pytest.mark.parametrize(
    ("role", "there"),
    [("head", []), ("resources", MATH[:1]), ("agent", MATH[1:]), ("model", ["policy_model"]), (None, None)],
)
def test_a_role_selects_the_servers_of_its_kinds(role: plan.Role | None, there: list[str] | None) -> None:
    whole = plan.complete_servers(Deployment(), plan.build_resources_server("math"), policy_model=PLAYER)
    assert names(plan.select_local(whole, role=role)) == (names(whole) if there is None else there)
    assert names(plan.select_local(whole, only="math_simple_agent")) == ["math_simple_agent"]


def test_required_servers_include_their_references() -> None:
    whole = plan.complete_servers(Deployment(), plan.build_resources_server("math"))
    assert plan.list_referenced_servers(whole) == [*MATH, "policy_model"]
    assert plan.list_referenced_servers(plan.select_local(whole, role="resources")) == ["math"]
    assert set(plan.list_referenced_servers(plan.select_local(whole, role="agent"))) == {*MATH, "policy_model"}

    written = plan.build_resources_server("math").model_copy(update={"place": Place(source="a.yaml", line=1)})
    assert plan.list_referenced_servers(plan.complete_servers(Deployment(servers=(written,)))) == MATH


def test_missing_servers_are_the_agent_and_environment_server_of_each_environment() -> None:
    there = [service("math", "resources_servers"), service("big", "responses_api_models")]
    found = plan.find_missing_servers(there)
    assert names(found) == MATH[1:]
    assert {block.refers["model_server"] for block in found} == {"big"}


def test_servers_with_another_agent_and_expected_servers_are_not_missing() -> None:
    resources = service("math", "resources_servers")
    agent = service("mine", "responses_api_agents", resources_server="math")
    assert names(plan.find_missing_servers([resources, agent])) == ["mine_environment_server"]
    assert plan.find_missing_servers([resources], expected=MATH) == ()


def test_the_policy_model_is_not_the_judge() -> None:
    def build_model(name: str, model: str) -> ServerConfig:
        return ServerConfig(
            name=name,
            kind="responses_api_models",
            implementation="gymsdk_model",
            kind_settings=ModelServerConfig(name=model),
        )

    math = plan.build_resources_server("math").model_copy(update={"models": {"judge": "judge"}})
    judge, policy = build_model("judge", "scripted/echo"), build_model("policy_model", "scripted/oracle")
    assert plan.find_policy_model([judge, math, policy]) == "scripted/oracle"
    assert plan.find_policy_model([judge, math, build_model("mine", "vllm/x")]) == "vllm/x"
    assert plan.find_policy_model([judge, math]) == ""


ELSEWHERE = "192.0.2.1"


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"head_host": "127.0.0.2"}, "127.0.0.2"),
        ({"head_host": "0.0.0.0"}, "0.0.0.0"),
        ({"head_host": ELSEWHERE}, "127.0.0.1"),
        ({"head_host": "127.0.0.2", "host": "127.0.0.3"}, "127.0.0.3"),
        # Set, although it is the default.
        ({"head_host": "127.0.0.2", "host": "127.0.0.1"}, "127.0.0.1"),
    ],
)
def test_servers_without_a_host_listen_at_default_host_or_at_a_head_of_this_machine(
    settings: dict[str, Any], host: str
) -> None:
    deployment = Deployment(**settings)
    assert plan.choose_host(deployment).host == host
    passed_on = Deployment.model_validate(json.loads(deployment.dump_for_child()))
    assert plan.choose_host(passed_on).host == host
    # A head that is bound says where it listens.
    with bind_socket("127.0.0.2") as at:
        assert plan.choose_host(Deployment(), {HEAD_SERVER: at}).host == "127.0.0.2"
        assert plan.choose_host(Deployment(host="127.0.0.3"), {HEAD_SERVER: at}).host == "127.0.0.3"


@pytest.mark.parametrize(
    ("settings", "options", "host"),
    [
        ([], {}, "127.0.0.2"),
        (["default_host=127.0.0.3"], {}, "127.0.0.3"),
        ([], {"host": "127.0.0.1"}, "127.0.0.1"),
        ([], {"host": None}, "127.0.0.2"),
    ],
)
def test_default_host_and_the_option_count_only_if_they_are_set(
    settings: list[str], options: dict[str, Any], host: str
) -> None:
    deployment = build_deployment([], ["head_server.host=127.0.0.2", *settings], options)
    assert plan.choose_host(deployment).host == host


def test_a_node_with_too_many_servers_for_its_head_names_the_limit() -> None:
    blocks = [plan.build_resources_server(f"math{number}") for number in range(MAX_ENTRIES + 1)]
    joining = Deployment(head_url="http://127.0.0.1:9")
    assert len(process.select_servers_here(blocks[1:], joining, NO_SECURITY)) == MAX_ENTRIES
    with pytest.raises(UsageError, match=rf"{MAX_ENTRIES + 1} servers would run here, .* at most {MAX_ENTRIES} of one"):
        process.select_servers_here(blocks, joining, NO_SECURITY)
    # With a head in the same process, nothing is registered.
    assert len(process.select_servers_here(blocks, Deployment(), NO_SECURITY)) == MAX_ENTRIES + 1
