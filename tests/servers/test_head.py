from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import yaml
from omegaconf import OmegaConf

from gymsdk.cluster.reports import Service, check_status
from gymsdk.servers import head

SERVICES = (
    Service(
        name="math",
        kind="resources_servers",
        implementation="math",
        host="127.0.0.1",
        port=1234,
        fields={"domain": "math"},
    ),
    Service(
        name="math_simple_agent",
        kind="responses_api_agents",
        implementation="simple_agent",
        host="127.0.0.1",
        port=1235,
        fields={
            "resources_server": {"type": "resources_servers", "name": "math"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        },
    ),
    Service(name="policy_model", kind="responses_api_models", implementation="gymsdk_model", port=1236),
)
ABOUT = {"policy_model_name": "scripted/oracle", "environment_server_routes": {"math": "math_environment_server"}}


def client(
    *services: Service, host: str = "127.0.0.1", authority: str = "127.0.0.1:11000", **options
) -> httpx.AsyncClient:
    app = head.create_app(services or SERVICES, host=host, port=11000, extra_config=ABOUT, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{authority}")


@pytest.fixture
async def answering_port() -> AsyncIterator[int]:
    """Yield the port of a server that answers."""

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_configuration_is_a_json_string_of_yaml() -> None:
    answer = await client().get("/global_config_dict_yaml")
    assert answer.headers["content-type"] == "application/json"
    assert yaml.safe_load(answer.json())["math"]["resources_servers"]["math"] == {
        "entrypoint": "app.py",
        "host": "127.0.0.1",
        "port": 1234,
        "domain": "math",
    }


async def test_parsing_the_answer_as_yaml_twice_gives_the_same() -> None:
    answer = await client().get("/global_config_dict_yaml")
    assert yaml.safe_load(yaml.safe_load(answer.text)) == yaml.safe_load(answer.json())


async def test_a_resources_server_is_found_if_instance_and_implementation_share_a_name() -> None:
    text = (await client().get("/global_config_dict_yaml")).text
    config = OmegaConf.create(yaml.safe_load(text))
    found = {}
    for name in config:
        try:
            found[name] = config[name].resources_servers[name].port
        except (KeyError, AttributeError):
            continue
    assert found == {"math": 1234}


async def test_a_server_is_found_by_the_only_value_of_each_of_its_levels() -> None:
    config = OmegaConf.create((await client().get("/global_config_dict_yaml")).json())
    blocks = [next(iter(next(iter(config[each.name].values())).values())) for each in SERVICES]
    assert [(each.host, each.port) for each in blocks] == [(each.host, each.port) for each in SERVICES]


async def test_every_reference_of_a_block_leads_to_a_server() -> None:
    config = yaml.safe_load((await client().get("/global_config_dict_yaml")).json())
    block = config["math_simple_agent"]["responses_api_agents"]["simple_agent"]
    for reference in (block["resources_server"], block["model_server"]):
        assert reference["type"] in config[reference["name"]]


async def test_the_configuration_contains_the_heads_address() -> None:
    config = yaml.safe_load((await client().get("/global_config_dict_yaml")).json())
    assert config["head_server"] == {"host": "127.0.0.1", "port": 11000}
    assert config["policy_model_name"] == "scripted/oracle"


@pytest.mark.parametrize(
    ("authority", "expected"), [("10.1.2.3:11000", "10.1.2.3"), ("node-7:80", "node-7"), ("[fe80::1]:11000", "fe80::1")]
)
async def test_a_wildcard_host_is_returned_as_the_host_the_client_called(authority: str, expected: str) -> None:
    anywhere = SERVICES[0].model_copy(update={"host": "0.0.0.0"})
    head_client = client(anywhere, host="0.0.0.0", authority=authority)
    config = yaml.safe_load((await head_client.get("/global_config_dict_yaml")).json())
    assert config["math"]["resources_servers"]["math"]["host"] == expected
    assert config["head_server"]["host"] == expected


async def test_an_invalid_host_header_is_not_echoed() -> None:
    anywhere = SERVICES[0].model_copy(update={"host": "0.0.0.0"})
    response = await client(anywhere, host="0.0.0.0").get("/global_config_dict_yaml", headers={"host": "a b: ${c}[::"})
    assert yaml.safe_load(response.json())["head_server"]["host"] == "127.0.0.1"


async def test_an_instance_has_every_field_and_its_health(answering_port: int) -> None:
    answers = SERVICES[0].model_copy(update={"port": answering_port, "started": 5.0})
    (instance,) = (await client(answers).get("/server_instances")).json()
    assert instance.pop("uptime_seconds") > 1e9
    assert instance.pop("pid") > 0
    assert instance == {
        "config_path": "math",
        "dir_path": "resources_servers/math",
        "entrypoint": "app.py",
        "host": "127.0.0.1",
        "name": "math",
        "port": answering_port,
        "process_name": "math",
        "server_type": "resources_servers",
        "start_time": 5.0,
        "status": "success",
        "url": f"http://127.0.0.1:{answering_port}",
    }


async def test_a_server_that_is_gone_is_reported_as_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert await check_status("127.0.0.1", port) == "connection_error"


async def test_a_silent_server_is_reported_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert await check_status("127.0.0.1", listener.getsockname()[1], seconds=0.1) == "timeout"


@pytest.mark.parametrize("path", ["/readyz", "/healthz", "/health"])
async def test_the_head_is_starting_until_every_server_answers(path: str) -> None:
    ready = False
    head_client = client(ready=lambda: ready)
    before = await head_client.get(path)
    ready = True
    after = await head_client.get(path)
    assert (before.status_code, before.json()) == (503, {"status": "starting"})
    assert (after.status_code, after.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/", "/livez"])
async def test_the_head_is_alive_from_the_start(path: str) -> None:
    assert (await client(ready=lambda: False).get(path)).json() == {"status": "ok"}
