"""Launch the servers: they start together, the head lists them, and they stop in bounded time in all cases."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from deployed import find_free_port, wait_until

from gymsdk import BrokenEnvironment, Environment, GymsdkError, ServerClient, UsageError
from gymsdk.config.model import Deployment, ResourcesServerConfig, ServerConfig, Times
from gymsdk.deploy.process import serve
from gymsdk.deploy.runner import BackgroundTask
from gymsdk.edge.addresses import bind_socket
from gymsdk.edge.listener import Listener
from gymsdk.edge.request import Receive, Scope, Send
from gymsdk.http import client as http
from gymsdk.observability.metrics import parse_samples

QUICK = Times(grace=0.2, ending=0.3)

ASKED = """
@hookimpl
def tasks(split: Literal["train"], seed):
    yield Task.ask("What is 40 + 2?")

@hookimpl
async def verify(transcript):
    return Verdict(reward=float(transcript.reply == "42"))

@hookimpl
def solve():
    return Message(content="42")
"""

LASTING = (
    """
from contextlib import asynccontextmanager

tasks_seen = []

@hookimpl
@asynccontextmanager
async def lifespan():
    {begins}
    tasks_seen.append(asyncio.current_task())
    yield 1
    tasks_seen.append(asyncio.current_task())
    {ends}

"""
    + ASKED
)

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "What is 40 + 2?"}]}}


def lasting(begins: str = "pass", ends: str = "pass") -> str:
    return LASTING.format(begins=begins, ends=ends)


@pytest.fixture(autouse=True)
async def _let_go() -> AsyncIterator[None]:
    yield
    await http.aclose()


@pytest.fixture
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10) as client:
        yield client


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


@pytest.mark.slow
async def test_every_server_responds_and_is_listed_by_the_head_once_the_launch_is_ready(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient
) -> None:
    async with serve([environment(ASKED)], model="scripted/oracle") as running:
        urls = {**running.urls, "head": running.head_url}
        answers = {name: (await http_client.get(f"{url}/readyz")).status_code for name, url in urls.items()}
        served_config = yaml.safe_load((await http_client.get(f"{running.head_url}/global_config_dict_yaml")).json())
        instances = (await http_client.get(f"{running.head_url}/server_instances")).json()
        played = (await http_client.post(f"{running.urls['made_simple_agent']}/run", json=ROW)).json()
        client = ServerClient(running.head_url)
        bodies = [{**ROW, "response": response} for response in (played["response"], {"output": []})]
        judged = [(await client.post("made", "/verify", json=body)).json()["reward"] for body in bodies]
    names = ["made", "made_simple_agent", "made_environment_server", "policy_model"]
    assert answers == dict.fromkeys([*names, "head"], 200)
    assert (played["reward"], judged) == (1.0, [1.0, 0.0])
    blocks = {spec.name: served_config[spec.name][spec.kind][spec.implementation] for spec in running.services}
    assert {name: f"http://{block['host']}:{block['port']}" for name, block in blocks.items()} == running.urls
    assert {entry["process_name"]: entry["status"] for entry in instances} == dict.fromkeys(running.urls, "success")
    assert served_config["environment_server_routes"] == {"made": "made_environment_server"}


async def test_each_server_can_have_a_configured_port_which_is_free_after_the_launch(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient
) -> None:
    deployment = Deployment(port=find_free_port(), server_ports={"made": find_free_port()})
    for _ in range(2):
        async with serve([environment(ASKED)], deployment=deployment) as running:
            assert running.head_url == f"http://127.0.0.1:{deployment.port}"
            assert running.urls["made"] == f"http://127.0.0.1:{deployment.server_ports['made']}"
            assert (await http_client.get(running.urls["made"])).status_code == 200
    assert is_free(deployment.port)


@pytest.mark.parametrize("which", ["the head", "made"])
async def test_a_port_in_use_prevents_the_start(environment: Callable[..., Environment], which: str) -> None:
    free_one, made = find_free_port(), environment(lasting())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = (
            Deployment(port=port, server_ports={"made": free_one})
            if which == "the head"
            else Deployment(port=free_one, server_ports={"made": port})
        )
        with pytest.raises(UsageError, match=rf"{which} cannot listen: port {port} of 127.0.0.1 is in use; stop"):
            async with serve([made], deployment=deployment):
                pass
    assert made.plugin.tasks_seen == []  # type: ignore[attr-defined]  # defined by the test environment
    assert is_free(free_one)


@pytest.mark.parametrize("key", ["host", "head_server", "made"])
async def test_a_public_host_is_rejected_at_every_place_in_the_configuration(
    key: str,
) -> None:
    block = ServerConfig(
        name="there",
        kind="resources_servers",
        implementation="tool_call",
        kind_settings=ResourcesServerConfig(environment="tool_call"),
        host="0.0.0.0" if key == "made" else None,
    )
    hosts = {"host": {"host": "0.0.0.0"}, "head_server": {"head_host": "0.0.0.0"}, "made": {}}[key]
    with pytest.raises(UsageError, match=r"'0\.0\.0\.0' could use these servers.*with --insecure"):
        async with serve(deployment=Deployment(servers=(block,), port=find_free_port(), **hosts)):
            pass


@pytest.mark.parametrize(
    ("environments", "model", "message"),
    [
        ([], "scripted/oracle", "name them, as in gymsdk serve math --role model"),
        (["math"], None, "--role model has no model to serve; add one with --model"),
    ],
)
async def test_a_model_node_requires_a_model_and_the_oracle_requires_environments(
    environments: list[str], model: str | None, message: str
) -> None:
    deployment = Deployment(role="model", head_url="http://127.0.0.1:9", server_ports={"policy_model": 9})
    with pytest.raises(UsageError, match=message):
        async with serve(environments, deployment=deployment, model=model):
            pass


async def test_a_public_host_is_accepted_with_insecure(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient
) -> None:
    async with serve([environment(ASKED)], deployment=Deployment(host="0.0.0.0", insecure=True)) as running:
        seen = running.head_url.replace("127.0.0.1", "localhost")
        served_config = yaml.safe_load((await http_client.get(f"{seen}/global_config_dict_yaml")).json())
        instances = (await http_client.get(f"{seen}/server_instances")).json()
    assert served_config["made"]["resources_servers"]["made"]["host"] == "localhost"
    assert {instance["status"] for instance in instances} == {"success"}


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_loopback_has_other_names(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient, host: str
) -> None:
    async with serve([environment(ASKED)], deployment=Deployment(host=host)) as running:
        served_config = yaml.safe_load((await http_client.get(f"{running.head_url}/global_config_dict_yaml")).json())
        assert (await http_client.get(running.urls["made"])).status_code == 200
    assert served_config["made"]["resources_servers"]["made"]["host"] == host


async def test_an_address_of_another_machine_is_reported(environment: Callable[..., Environment]) -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        async with serve([environment(ASKED)], deployment=Deployment(host="192.0.2.1", insecure=True)):
            pass


@pytest.mark.parametrize("names", [["policy_model"], ["head_server"], ["made", "made"]])
async def test_a_reserved_or_repeated_server_name_is_rejected(
    made: Callable[..., ModuleType], names: list[str]
) -> None:
    with pytest.raises(UsageError, match=f"two servers would be named '{names[0]}'; leave out one"):
        async with serve([Environment(name, made(ASKED)) for name in names]):
            pass


async def test_a_lifespan_starts_and_ends_in_one_task_wherever_its_context_ends(
    environment: Callable[..., Environment],
) -> None:
    made = environment(lasting("await asyncio.timeout(60).__aenter__()"))
    context = serve([made])
    running = await asyncio.create_task(context.__aenter__())
    await asyncio.create_task(context.__aexit__(None, None, None))
    assert is_free(running.services[0].port)
    began, ended = made.plugin.tasks_seen  # type: ignore[attr-defined]  # defined by the test environment
    assert began is ended


async def test_the_head_reports_servers_that_are_starting(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient
) -> None:
    deployment = Deployment(port=find_free_port(), times=QUICK)
    context = serve([environment(lasting("await asyncio.sleep(60)"))], deployment=deployment)
    opening = asyncio.create_task(context.__aenter__())
    await wait_until(lambda: not is_free(deployment.port))
    answer = await http_client.get(f"http://127.0.0.1:{deployment.port}/readyz")
    opening.cancel()
    await asyncio.wait({opening})
    assert (answer.status_code, answer.json()) == (503, {"status": "starting"})
    assert is_free(deployment.port)


@pytest.mark.parametrize(
    ("begins", "error", "message"),
    [
        ("1 / 0", BrokenEnvironment, "environment 'made': hook 'lifespan' raised ZeroDivisionError"),
        ("await asyncio.sleep(60)", GymsdkError, "the lifespan of environment 'made' did not start within 0.2 sec"),
    ],
)
async def test_an_environment_that_fails_or_hangs_at_start_stops_all_servers(
    environment: Callable[..., Environment], begins: str, error: type[GymsdkError], message: str
) -> None:
    deployment = Deployment(port=find_free_port(), times=QUICK.model_copy(update={"starting": 0.2}))
    with pytest.raises(error, match=message):
        async with serve([environment(lasting(begins))], deployment=deployment):
            pass
    assert is_free(deployment.port)


async def test_an_environment_that_hangs_at_stop_is_abandoned_and_named(
    environment: Callable[..., Environment], caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment(port=find_free_port(), times=QUICK)
    async with serve([environment(lasting(ends="await asyncio.sleep(60)"))], deployment=deployment):
        pass
    assert "the lifespan of environment 'made' did not end within 0.3 seconds; it is left behind" in caplog.text
    assert is_free(deployment.port)


SLOW = """
closed, grading = [], []

@hookimpl
async def reset():
    return Reset()

@hookimpl
async def close():
    closed.append(1)

""" + ASKED.replace("    return Verdict", "    grading.append(1)\n    await asyncio.sleep({pause})\n    return Verdict")


@pytest.mark.parametrize(("pause", "status"), [(0.1, 200), (60, 503)])
async def test_a_running_episode_is_completed_before_the_stop_or_cancelled_and_closed(
    environment: Callable[..., Environment],
    http_client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    pause: float,
    status: int,
) -> None:
    made = environment(SLOW.format(pause=pause))
    async with serve([made], deployment=Deployment(times=QUICK)) as running:
        agent = running.urls["made_simple_agent"]
        playing = asyncio.create_task(http_client.post(f"{agent}/run", json=ROW))
        await wait_until(lambda: made.plugin.grading)
    answer = await playing
    assert (answer.status_code, answer.json().get("reward")) == (status, 1.0 if status == 200 else None)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert made.plugin.closed == [1]  # type: ignore[attr-defined]  # defined by the test environment
    assert "Traceback" not in caplog.text


@pytest.mark.slow
async def test_open_sessions_are_closed_at_stop(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient
) -> None:
    made = environment(SLOW.format(pause=0))
    async with serve([made]) as running:
        for _ in range(3):
            http_client.cookies.clear()
            await http_client.post(f"{running.urls['made']}/seed_session", json=ROW)
        metrics = (await http_client.get(f"{running.urls['made']}/metrics")).text
    assert ("sessions_open", {"server": "made"}, 3.0) in parse_samples(metrics)
    assert made.plugin.closed == [1, 1, 1]  # type: ignore[attr-defined]  # defined by the test environment


async def test_servers_without_a_host_are_reached_at_the_configured_address_of_the_head(
    environment: Callable[..., Environment], http_client: httpx.AsyncClient
) -> None:
    deployment = Deployment(head_host="127.0.0.2", port=find_free_port())
    async with serve([environment(ASKED)], deployment=deployment) as running:
        served_config = yaml.safe_load((await http_client.get(f"{running.head_url}/global_config_dict_yaml")).json())
        assert served_config["head_server"] == {"host": "127.0.0.2", "port": deployment.port}
        assert {spec.host for spec in running.services} == {"127.0.0.2"}
        for url in running.urls.values():
            assert (await http_client.get(f"{url}/livez")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"advertise_host": "127.0.0.3"}, "the head"),
        ({"advertise_host": "127.0.0.3", "host": "127.0.0.2"}, "the head"),
        ({"advertise_host": "127.0.0.3", "head_host": "127.0.0.3", "host": "127.0.0.2"}, "made"),
    ],
)
async def test_an_advertised_address_without_a_listener_is_an_error(
    environment: Callable[..., Environment], settings: dict[str, Any], what: str
) -> None:
    deployment = Deployment(**settings, port=find_free_port())
    with pytest.raises(UsageError, match=rf"^{what} listens at .*, but clients are told 127\.0\.0\.3, where nothing"):
        async with serve([environment(ASKED)], deployment=deployment):
            pass


@pytest.mark.parametrize("advertised", ["127.0.0.3", "192.0.2.1"])
async def test_an_advertised_address_with_a_listener_or_of_another_machine_is_accepted(
    environment: Callable[..., Environment], advertised: str
) -> None:
    deployment = Deployment(host="0.0.0.0", insecure=True, advertise_host=advertised)
    async with serve([environment(ASKED)], deployment=deployment) as running:
        assert {service.host for service in running.services} == {advertised}


async def test_a_stop_breaks_off_a_streamed_response_without_an_error_in_the_log(caplog) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"more ", "more_body": True})
            await asyncio.sleep(0.05)

    with bind_socket("127.0.0.1") as at:
        task = BackgroundTask("a stream", Listener(stream, at, grace=0.1).run)
        await task.wait_until_up(10)
        reader, writer = await asyncio.open_connection(*at.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        received = await reader.readuntil(b"more ")
        await task.stop(10)
        received += await asyncio.wait_for(reader.read(), 10)
        writer.close()
    # The last chunk of a complete response is empty.
    assert not received.endswith(b"0\r\n\r\n")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
