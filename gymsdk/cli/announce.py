"""Curl lines that open, play and judge one task of a served environment, to be pasted as they are."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import typer

from gymsdk import jsonl, responses
from gymsdk.deploy.plan import agent_of
from gymsdk.environment import Environment
from gymsdk.episode import Budget
from gymsdk.errors import GymsdkError
from gymsdk.models import scripted
from gymsdk.rollouts.jobs import stamped
from gymsdk.rollouts.tasks import default_split
from gymsdk.threads import ThreadPool
from gymsdk.types import Item, Rollout, Row

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.servers.service import Service
    from gymsdk.types import Model

SERVER_LABELS = {
    "resources_servers": "resources",
    "responses_api_agents": "agent",
    "environment_servers": "environment server",
    "responses_api_models": "model",
}
"""What people call the servers."""

ORACLE_MODEL = "scripted/oracle"


class Announcer:
    """Tells on standard output what runs, once it does; *ready* says that it has."""

    def __init__(self, *, json: bool, tries: bool) -> None:
        self.ready = False
        self._json = json
        self._tries = tries
        # What is printed later by an author's code goes elsewhere.
        self._out = sys.stdout

    async def __call__(
        self,
        head_url: str,
        services: Sequence[Service],
        model: Model | str | None,
        folder: Path | None,
        environments: Sequence[Environment],
    ) -> None:
        """Tell of *services*, the head of which is at *head_url*, and of who plays."""
        player = _find_policy_name(model, services)
        lines = (
            [_format_json(head_url, services, player)]
            if self._json
            else [*_format_addresses(head_url, services, player)]
        )
        if self._tries and not self._json and folder is not None:
            urls = {each.name: each.url for each in services}
            for environment in environments:
                lines += ["", *await build_curl_lines(environment, urls, folder)]
        typer.echo("\n".join(lines), file=self._out)
        self._out.flush()
        self.ready = True


def _find_policy_name(model: Model | str | None, services: Sequence[Service]) -> str:
    """Give who plays: as it is called here, or as its server says."""
    from gymsdk.deploy.process import named
    from gymsdk.http.tls import redact_url

    if model is not None:
        return redact_url(model) if isinstance(model, str) else named(model)
    told = (str(each.fields.get("model") or "") for each in services if each.kind == "responses_api_models")
    return next(told, "")


def _format_json(head_url: str, services: Sequence[Service], model: str) -> str:
    """Give what runs as one line of JSON, for a program that waits for it."""
    servers = {each.name: {"url": each.url, "type": each.kind} for each in services}
    return orjson.dumps({"head": head_url, "pid": os.getpid(), "model": model, "servers": servers}).decode()


def _format_addresses(head_url: str, services: Sequence[Service], model: str) -> Iterator[str]:
    width = max((len(each.name) for each in services), default=4)
    yield f"{'head':<{width}}  {head_url}"
    for each in services:
        yield f"{each.name:<{width}}  {each.url}  {SERVER_LABELS[each.kind]}"
    yield f"Ready{_describe_policy(model)}. Ctrl-C ends it."


def _describe_policy(model: str) -> str:
    if model == ORACLE_MODEL:
        return f": {ORACLE_MODEL} plays, which knows the answers; name another with --model"
    return f": {model} plays" if model else ""


EXAMPLE_BUDGET = Budget(seconds=10.0)
"""What playing the example may take."""


async def build_curl_lines(environment: Environment, urls: Mapping[str, str], folder: Path) -> list[str]:
    """Give the lines for *environment*, the bodies they send written to *folder*."""
    from gymsdk.episode import play

    try:
        tasks = environment.tasks(default_split(environment), seed=0)
        # Servers answer on this loop, which the wait for a task must not hold up.
        task = await ThreadPool().run(partial(next, tasks, None), timeout=EXAMPLE_BUDGET.seconds)
    except (GymsdkError, TimeoutError) as error:
        return [f"# {environment.name} has no task to try: {error}"]
    if task is None:
        return [f"# {environment.name} has no task to try: its split {default_split(environment)!r} is empty"]
    row = stamped(task.row(), environment=environment.name, task=0, sampling={})
    rollout = await play(environment, scripted.build("oracle"), row, budget=EXAMPLE_BUDGET)
    return [f"# {environment.name}", *_format_requests(environment.name, urls, folder, row, rollout)]


def _format_requests(name: str, urls: Mapping[str, str], folder: Path, row: Row, rollout: Rollout) -> Iterator[str]:
    response = rollout.response or responses.build_response([], model="")
    jar, base = folder / f"{name}.cookies", urls[name]
    cookies = f"-b {shlex.quote(str(jar))} -c {shlex.quote(str(jar))}"
    body = _write_body(folder / f"{name}.json", row)
    yield _format_curl(f"-c {shlex.quote(str(jar))}", body, f"{base}/seed_session")
    for call in _list_function_calls(response):
        yield _format_curl(cookies, shlex.quote(call["arguments"]), f"{base}/{call['name']}")
    judged = _write_body(folder / f"{name}.verify.json", {**row, "response": response})
    yield _format_curl(cookies, judged, f"{base}/verify")
    yield _format_curl("", body, f"{urls[agent_of(name)]}/run")


def _list_function_calls(response: Item) -> list[Item]:
    return [item for item in response["output"] if item.get("type") == "function_call"]


def _write_body(path: Path, body: Row) -> str:
    path.write_bytes(jsonl.dump_row(body))
    return shlex.quote(f"@{path}")


def _format_curl(cookies: str, body: str, url: str) -> str:
    words = ["curl -sS", cookies, "-H 'content-type: application/json' -d", body, shlex.quote(url), "; echo"]
    return " ".join(word for word in words if word).replace(" ; ", "; ")
