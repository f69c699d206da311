"""Shared helpers of the run tests: a progress recorder, and servers that behave like NeMo Gym's."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from gymsdk import responses
from gymsdk.responses import build_usage
from gymsdk.rollouts.folder import RunProgress
from gymsdk.rollouts.jobs import PlayedJob


class RecordingProgress:
    """A progress reporter that records the reports of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.progress = RunProgress()
        self.total = 0
        self.played: list[PlayedJob] = []

    def log(self, message: str) -> None:
        self.messages.append(message)

    def start(self, *, total: int, progress: RunProgress) -> None:
        self.total, self.progress = total, progress

    def set_total(self, total: int) -> None:
        self.total = total

    def finish_job(self, played: PlayedJob) -> None:
        self.played.append(played)


@asynccontextmanager
async def serve_app(app: Any) -> AsyncIterator[tuple[str, int]]:
    """Serve *app* on a loopback port and yield its host and port."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    async with asyncio.TaskGroup() as group:
        server_task = group.create_task(server.serve([bound]))
        while not server.started:  # noqa: ASYNC110  # uvicorn reports its start in no other way
            await asyncio.sleep(0.01)
        try:
            yield bound.getsockname()
        finally:
            server.should_exit = True
            await server_task


BuildReply = Callable[[dict[str, Any], int], Any]
"""Returns the reply to a row, given the number of the request: a JSON value or a response."""


def reply_four(row: dict[str, Any], _number: int) -> dict[str, Any]:
    """Reply as NeMo Gym's simple agent does after the policy says `4`: with the verifier's fields at the top level."""
    reply = responses.build_message("4", id="msg_0")
    response = responses.build_response([reply], model="theirs", usage=build_usage(7, 3), id="resp_0")
    right = row.get("answer") == 4
    fields = {key: row[key] for key in ("responses_create_params", "answer") if key in row}
    return {**fields, "response": response, "reward": float(right), "extracted_answer": "4"}


@dataclass
class NemoGymServers:
    """An agent and a resources server of NeMo Gym, with their head, on one port."""

    run_reply: BuildReply = reply_four
    verify_reply: BuildReply = reply_four
    mode: object = "unknown"
    agent: str = "sums_simple_agent"
    head: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/global_config_dict_yaml", self.config, methods=["GET"])
        app.add_api_route("/reverify_mode", lambda: self.mode, methods=["GET"])
        app.add_api_route("/run", self.run, methods=["POST"])
        app.add_api_route("/verify", self.verify, methods=["POST"])
        return app

    def config(self) -> str:
        host, port = self.head.removeprefix("http://").split(":")
        server = {"entrypoint": "app.py", "host": host, "port": int(port)}
        reference = {"resources_server": {"type": "resources_servers", "name": "sums"}}
        agents = {"simple_agent": {**server, **reference}}
        blocks = {"sums": {"resources_servers": {"sums": server}}, self.agent: {"responses_api_agents": agents}}
        return str(yaml.safe_dump({"head_server": {"host": host, "port": int(port)}, **self.about, **blocks}))

    async def run(self, request: Request) -> Response:
        return self._reply(await request.json(), self.run_reply)

    async def verify(self, request: Request) -> Response:
        return self._reply(await request.json(), self.verify_reply)

    def _reply(self, row: dict[str, Any], build_reply: BuildReply) -> Response:
        self.sent.append(row)
        answer = build_reply(row, len(self.sent))
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[NemoGymServers]:
        async with serve_app(self.app()) as (host, port):
            self.head = f"http://{host}:{port}"
            yield self


@pytest.fixture
def tasks(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file of rows, by default additions for the agent of `sums`."""

    def write(*rows: dict[str, Any], count: int = 1) -> Path:
        path = tmp_path / "tasks.jsonl"
        reference = {"type": "responses_api_agents", "name": "sums_simple_agent"}
        prompt = {"input": [{"role": "user", "content": "2 + 2"}]}
        chosen = rows or [{"responses_create_params": prompt, "answer": 4, "agent_ref": reference}] * count
        path.write_text("".join(f"{json.dumps(row)}\n" for row in chosen))
        return path

    return write


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of rollouts."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def read_comparable(path: Path) -> dict[tuple[int, int], Any]:
    """Return the lines of a file of rollouts by task and repeat, without ids and times."""
    found = {}
    for line in read_lines(path):
        del line["gymsdk"]["timing"]
        line["gymsdk"].pop("rollout_id", None)
        for key in ("id", "created_at"):
            (line["response"] or {}).pop(key, None)
        found[line["_ng_task_index"], line["_ng_rollout_index"]] = line
    return found
