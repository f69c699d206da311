"""Logs of real servers: one search for a rollout finds its lines in every log, and no line contains its prompt."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from gymsdk import UsageError
from gymsdk.config.model import LogConfig
from gymsdk.edge.app import create_app
from gymsdk.edge.request import json_response
from gymsdk.http import client as http
from gymsdk.models.registry import model
from gymsdk.observability.logging import LogHandler, log_to
from gymsdk.observability.metrics import ServerMetrics
from gymsdk.servers import agent
from gymsdk.servers.remote import RemoteEnvironment

from .nodes import wait_until

PROMPT, SECRET = "What is the answer to Wunderhorn?", "hush-this-is-a-key"

SERVE_SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from gymsdk.config.model import Deployment, LogConfig
from gymsdk.deploy.process import serve
from gymsdk.observability.logging import log_to

async def main():
    deployment = Deployment(environments={"sums": {"key": sys.argv[2]}})
    async with serve(model="scripted/null", deployment=deployment) as running:
        print(json.dumps({"head": running.head_url, **running.urls}), flush=True)
        await asyncio.to_thread(sys.stdin.read)

with log_to(LogConfig(level="info", format=sys.argv[3], directory=Path(sys.argv[1]))):
    asyncio.run(main())
"""
"""Source of a program that runs servers until its standard input ends."""

StartServers = Callable[..., dict[str, str]]
ServeApp = Callable[[FastAPI], AbstractAsyncContextManager[str]]
ResourcesClient = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def start_servers(installed: Callable[..., Path]) -> Iterator[StartServers]:
    installed()
    processes: list[subprocess.Popen[str]] = []

    def start(folder: Path, form: str = "json") -> dict[str, str]:
        command = [sys.executable, "-c", SERVE_SCRIPT, str(folder), SECRET, form]
        process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(process)
        urls: dict[str, str] = json.loads(process.stdout.readline())
        return urls

    yield start
    for process in processes:
        process.communicate(timeout=20)


@pytest.fixture(autouse=True)
async def close_client():
    yield
    await http.aclose()


def flush() -> None:
    for handler in logging.getLogger("gymsdk").handlers:
        handler.flush()


def lines(file: Path) -> list[dict[str, Any]]:
    flush()
    return [json.loads(line) for line in file.read_text().splitlines()]


def row(**fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": PROMPT}]}, "answer": 424242, **fields}


async def find_request_line(file: Path, route: str = "/run") -> dict[str, Any]:
    """Return the line of a request; the server writes it while it sends the response."""
    await wait_until(lambda: file.exists() and route in file.read_text())
    [line] = [line for line in lines(file) if line["fields"].get("route") == route]
    return line


async def run_row(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/run", json=body, headers=headers)


@pytest.mark.slow
async def test_one_search_follows_a_rollout_over_agent_resources_and_model(
    start_servers: StartServers, serve_app: ServeApp, tmp_path: Path
):
    logs = tmp_path / "logs"
    urls = start_servers(logs)
    player = model("endpoint/null", base_url=f"{urls['policy_model']}/v1")
    app = agent.create_app(RemoteEnvironment(urls["sums"], "sums"), player)
    with log_to(LogConfig(level="info", format="json", directory=logs)):
        async with serve_app(app) as url:
            responses = [
                await run_row(url, row(_ng_rollout_id=name), **{"x-request-id": f"request-{name}"})
                for name in ("first", "second")
            ]
    assert [response.status_code for response in responses] == [200, 200]
    assert responses[0].headers["x-request-id"] == "request-first"
    await wait_until(lambda: (logs / "sums.log").read_text().count("/close_session") == 2 * 2)
    logged = {file.stem: [line for line in lines(file) if line["rollout_id"] == "first"] for file in logs.glob("*.log")}
    routes = {
        server: [line["fields"]["route"] for line in server_lines if line["level"] == "info"]
        for server, server_lines in logged.items()
    }
    assert routes.pop("sums_simple_agent") == ["/run"]
    assert routes.pop("policy_model") == ["/v1/chat/completions"]
    assert routes.pop("sums") == ["/seed_session", "/verify", "/close_session"]
    assert not any(routes.values())
    assert {line["request_id"] for server_lines in logged.values() for line in server_lines} == {"request-first"}
    text = "".join(file.read_text() for file in logs.iterdir())
    assert not any(word in text for word in ("Wunderhorn", "424242", SECRET))


@pytest.mark.slow
async def test_each_line_of_a_run_names_its_rollout_as_the_logs_do(start_servers: StartServers, tmp_path: Path):
    logs, out, tasks = tmp_path / "logs", tmp_path / "out", tmp_path / "tasks.jsonl"
    urls = start_servers(logs)
    rows = [row(agent_ref={"name": "sums_simple_agent"}), row(answer="none", agent_ref={"name": "sums_simple_agent"})]
    tasks.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    command = [sys.executable, "-m", "gymsdk", "rollout", "--head", urls["head"], "--tasks", str(tasks)]
    await (await asyncio.create_subprocess_exec(*command, "--output", str(out))).wait()
    [scored], [failed] = (lines(out / name) for name in ("rollouts.jsonl", "failures.jsonl"))
    ids = [each["gymsdk"]["rollout_id"] for each in (scored, failed)]
    assert [each["gymsdk"]["id"] for each in (scored, failed)] == ["0:0", "1:0"]
    log = logs / "sums_simple_agent.log"
    await wait_until(lambda: log.exists() and all(each in log.read_text() for each in ids))
    logged = {line["rollout_id"] for line in lines(log) if line["fields"]["route"] == "/run"}
    assert logged == set(ids)


@pytest.mark.slow
async def test_a_rollout_without_an_id_is_logged_by_its_indices(start_servers: StartServers, tmp_path: Path):
    urls = start_servers(tmp_path)
    await run_row(urls["sums_simple_agent"], row(_ng_task_index=7, _ng_rollout_index=3))
    line = await find_request_line(tmp_path / "sums_simple_agent.log")
    assert line["rollout_id"] == "7:3"


async def test_a_foreign_agents_tool_call_is_logged_under_its_sessions_rollout(
    resources_client: ResourcesClient, tmp_path: Path
):
    row_fields = {"responses_create_params": {"input": PROMPT}, "initial_count": 1, "expected_count": 2}
    with log_to(LogConfig(level="info", format="json", directory=tmp_path)):
        async with resources_client() as client:
            await client.post("/seed_session", json={**row_fields, "_ng_rollout_id": "theirs"})
            assert (await client.post("/increment_counter", json={"count": 1})).json() == {"success": True}
    logged = [(line["fields"]["route"], line["rollout_id"]) for line in lines(tmp_path / "counter.log")]
    assert logged == [("/seed_session", "theirs"), ("/increment_counter", "theirs")]


@pytest.mark.slow
async def test_the_text_format_has_a_line_for_each_request(start_servers: StartServers, tmp_path: Path):
    urls = start_servers(tmp_path, "text")
    await run_row(urls["sums_simple_agent"], row(_ng_rollout_id="r1"), **{"x-request-id": "q1"})
    file = tmp_path / "sums_simple_agent.log"
    await wait_until(lambda: file.exists() and "/run" in file.read_text())
    [line] = [line for line in file.read_text().splitlines() if "/run" in line]
    assert " info sums_simple_agent rollout=r1 request=q1 POST /run 200 in " in line


@pytest.mark.slow
async def test_a_failure_is_in_the_line_of_its_request(start_servers: StartServers, tmp_path: Path):
    urls = start_servers(tmp_path)
    response = await run_row(urls["sums_simple_agent"], {"responses_create_params": {"input": PROMPT}})
    line = await find_request_line(tmp_path / "sums_simple_agent.log")
    assert (response.status_code, line["fields"]["status"]) == (422, 422)
    assert PROMPT not in json.dumps(line)


@pytest.fixture
async def lamp(tmp_path: Path):
    """Yield a client of a server in this process, and a function that reads the log lines so far."""
    app = create_app("lamp", "A lamp.", metrics=ServerMetrics("lamp"))

    async def fail() -> None:
        raise ZeroDivisionError("of 424242")

    async def echo_request_id(request: Request):
        return json_response({"request": request.headers.get("x-request-id")})

    app.add_api_route("/breaks", fail, methods=["POST"])
    app.add_api_route("/carries", echo_request_id, methods=["POST"])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with log_to(LogConfig(level="info", format="json", directory=tmp_path)):
        async with httpx.AsyncClient(transport=transport, base_url="http://lamp.test") as client:
            yield client, lambda: lines(tmp_path / "lamp.log")


async def test_an_exception_in_a_request_is_logged_by_its_type_without_its_message(lamp):
    client, read_log = lamp
    assert (await client.post("/breaks")).status_code == 500
    [line] = read_log()
    assert (line["level"], line["fields"]["error"], "424242" in json.dumps(line)) == (
        "warning",
        "ZeroDivisionError",
        False,
    )


@pytest.mark.parametrize("id", ["a b", "x" * 129, 'a"b', "", "ä"])
async def test_an_invalid_request_id_is_replaced(lamp, id):
    client, read_log = lamp
    response = await client.post("/carries", headers={b"x-request-id": id.encode("latin-1")})
    assert len(response.headers["x-request-id"]) == 16
    assert read_log()[0]["request_id"] == response.headers["x-request-id"]


async def test_health_checks_are_not_logged(lamp, tmp_path: Path):
    client, _ = lamp
    for path in ("/", "/livez", "/readyz", "/metrics"):
        assert (await client.get(path)).status_code == 200
    flush()
    assert not (tmp_path / "lamp.log").exists()


def test_a_line_outside_of_requests_names_the_process(tmp_path: Path):
    with log_to(LogConfig(level="info", directory=tmp_path, server="math")):
        logging.getLogger("gymsdk").info("over\nand %s", "out")
    assert (tmp_path / "math.log").read_text().endswith("info math rollout=- request=- over\\nand out\n")


def test_a_log_file_is_created_with_its_first_line(tmp_path: Path):
    with log_to(LogConfig(level="info", directory=tmp_path)):
        assert list(tmp_path.iterdir()) == []
        logging.getLogger("gymsdk").info("here")
        flush()
        assert [each.name for each in tmp_path.iterdir()] == ["gymsdk.log"]


def test_a_log_file_of_another_user_is_reported_at_once(tmp_path: Path):
    (tmp_path / "gymsdk.log").mkdir()
    with pytest.raises(UsageError, match=r"--log-dir .* is not writable"), log_to(LogConfig(directory=tmp_path)):
        pass


@pytest.mark.slow
def test_several_processes_write_whole_lines_into_one_file(tmp_path: Path):
    source = (
        "import logging, sys\nfrom pathlib import Path\nfrom gymsdk.config.model import LogConfig\n"
        "from gymsdk.observability.logging import log_to\n"
        "with log_to(LogConfig(level='info', format='json', directory=Path(sys.argv[1]), server='both')):\n"
        "    for number in range(300): logging.getLogger('gymsdk').info('x' * 5000)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", source, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    assert [len(line["message"]) for line in lines(tmp_path / "both.log")] == [5000] * 600


def test_an_unwritable_log_directory_is_reported_at_once(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=r"--log-dir .* is not writable .*; choose a directory"),
        log_to(LogConfig(directory=tmp_path / "file")),
    ):
        pass


def test_the_default_options_do_not_change_the_logger():
    log = logging.getLogger("gymsdk")
    before = (list(log.handlers), log.level)
    with log_to(LogConfig()):
        assert (list(log.handlers), log.level) == before
        assert not logging.getLogger("gymsdk.requests").isEnabledFor(logging.WARNING)
    with log_to(LogConfig(level="info")):
        assert any(isinstance(each, LogHandler) for each in log.handlers)
    assert (list(log.handlers), log.level) == before


def test_request_lines_are_not_shown_at_warning_level(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with log_to(LogConfig(level="info", directory=tmp_path)):
        logging.getLogger("gymsdk.requests").warning("POST /run 503")
    assert not caplog.records
    assert "POST /run 503" in (tmp_path / "gymsdk.log").read_text()


def test_an_exception_is_logged_by_place_and_type_without_its_message(tmp_path: Path):
    with log_to(LogConfig(format="json", directory=tmp_path)):
        try:
            int(PROMPT)
        except ValueError:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    [line] = lines(tmp_path / "gymsdk.log")
    assert line["fields"]["traceback"].endswith("ValueError")
    assert PROMPT not in json.dumps(line)


def test_without_a_directory_lines_go_to_standard_error():
    source = (
        "import logging\nfrom gymsdk.config.model import LogConfig\nfrom gymsdk.observability.logging import log_to\n"
        "with log_to(LogConfig(format='json')): logging.getLogger('gymsdk').warning('careful')\n"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=os.environ)
    assert [json.loads(line)["message"] for line in io.StringIO(result.stderr)] == ["careful"]
