"""What the tests of runs share: someone who follows one, and servers that speak as NeMo Gym's do."""

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
from gymsdk.rollouts.folder import RunProgress
from gymsdk.rollouts.retry import PlayedJob


class Ear:
    """Hears what a run tells."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.standing = RunProgress()
        self.total = 0
        self.played: list[PlayedJob] = []

    def log(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def start(self, *, total: int, progress: RunProgress) -> None:
        self.total, self.standing = total, progress

    def finish_job(self, played: PlayedJob) -> None:
        self.played.append(played)


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[tuple[str, int]]:
    """The address of *app*, served on a loopback port."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([bound]))
        while not server.started:  # noqa: ASYNC110  # uvicorn tells of its start in no other way
            await asyncio.sleep(0.01)
        try:
            yield bound.getsockname()
        finally:
            server.should_exit = True
            await serving


Answered = Callable[[dict[str, Any], int], Any]
"""Gives the answer to a row, told the how manieth request it is: a JSON value, or a response as it is."""


def echoed(row: dict[str, Any], _number: int) -> dict[str, Any]:
    """Play *row* by saying `4`: what NeMo Gym's simple agent answers, its verifier's fields flat."""
    reply = responses.build_message("4", id="msg_0")
    response = responses.build_response([reply], model="theirs", usage=responses.build_usage(7, 3), id="resp_0")
    right = row.get("answer") == 4
    kept = {key: row[key] for key in ("responses_create_params", "answer") if key in row}
    return {**kept, "response": response, "reward": float(right), "extracted_answer": "4"}


@dataclass
class Theirs:
    """One agent and one resources server of NeMo Gym's on one port, and their head on the same."""

    answered: Answered = echoed
    verified: Answered = echoed
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
        place = {"entrypoint": "app.py", "host": host, "port": int(port)}
        judged = {"resources_server": {"type": "resources_servers", "name": "sums"}}
        agents = {"simple_agent": {**place, **judged}}
        blocks = {"sums": {"resources_servers": {"sums": place}}, self.agent: {"responses_api_agents": agents}}
        return str(yaml.safe_dump({"head_server": {"host": host, "port": int(port)}, **self.about, **blocks}))

    async def run(self, request: Request) -> Response:
        return self._given(await request.json(), self.answered)

    async def verify(self, request: Request) -> Response:
        return self._given(await request.json(), self.verified)

    def _given(self, row: dict[str, Any], answered: Answered) -> Response:
        self.sent.append(row)
        answer = answered(row, len(self.sent))
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Theirs]:
        async with listening(self.app()) as (host, port):
            self.head = f"http://{host}:{port}"
            yield self


@pytest.fixture
def tasks(tmp_path: Path) -> Callable[..., Path]:
    """A file of rows, by default additions for the agent of `sums`."""

    def write(*rows: dict[str, Any], count: int = 1) -> Path:
        path = tmp_path / "tasks.jsonl"
        reference = {"type": "responses_api_agents", "name": "sums_simple_agent"}
        prompt = {"input": [{"role": "user", "content": "2 + 2"}]}
        given = rows or [{"responses_create_params": prompt, "answer": 4, "agent_ref": reference}] * count
        path.write_text("".join(f"{json.dumps(row)}\n" for row in given))
        return path

    return write


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of rollouts."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def told_by(path: Path) -> dict[tuple[int, int], Any]:
    """What a file of rollouts says by place, but for ids and times."""
    found = {}
    for line in lines_of(path):
        del line["gymsdk"]["timing"]
        line["gymsdk"].pop("rollout_id", None)
        for key in ("id", "created_at"):
            (line["response"] or {}).pop(key, None)
        found[line["_ng_task_index"], line["_ng_rollout_index"]] = line
    return found
