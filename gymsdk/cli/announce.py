"""Print the addresses of the servers that `gymsdk serve` started, the model, and curl commands to try."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import typer

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.servers.service import Service
    from gymsdk.types import Model, Rollout, Row

SERVER_LABELS = {
    "resources_servers": "resources",
    "responses_api_agents": "agent",
    "environment_servers": "environment server",
    "responses_api_models": "model",
}
"""Labels of the kinds of servers."""

ORACLE_MODEL = "scripted/oracle"

EXAMPLE_SECONDS = 10.0
"""Time limit of drawing a task for the curl commands, and of its episode."""


class Announcer:
    """Prints the running servers on standard output once they are ready.

    Args:
        json: Print one line of JSON instead of text.
        tries: Print curl commands to try.

    Attributes:
        ready: Whether the servers have been ready.
    """

    def __init__(self, *, json: bool, tries: bool) -> None:
        self.ready = False
        self._json = json
        self._tries = tries
        # `sys.stdout` is redirected later, so that the output of an environment's code goes elsewhere.
        self._out = sys.stdout

    async def __call__(
        self,
        head_url: str,
        services: Sequence[Service],
        model: Model | str | None,
        folder: Path | None,
        environments: Sequence[Environment],
    ) -> None:
        """Print *services* with the head at *head_url*, and the model."""
        policy = _find_policy_name(model, services)
        if self._json:
            lines = [_format_json(head_url, services, policy)]
        else:
            lines = [*_format_addresses(head_url, services, policy)]
        if self._tries and not self._json and folder is not None:
            urls = {each.name: each.url for each in services}
            for environment in environments:
                lines += ["", *await build_curl_lines(environment, urls, folder)]
        typer.echo("\n".join(lines), file=self._out)
        self._out.flush()
        self.ready = True


def _find_policy_name(model: Model | str | None, services: Sequence[Service]) -> str:
    """Return the name of the model as given here, or as its server reports it."""
    from gymsdk.deploy.process import get_policy_name
    from gymsdk.http.tls import redact_url

    if model is not None:
        return redact_url(model) if isinstance(model, str) else get_policy_name(model)
    names = (str(each.fields.get("model") or "") for each in services if each.kind == "responses_api_models")
    return next(names, "")


def _format_json(head_url: str, services: Sequence[Service], model: str) -> str:
    """Return the running servers as a line of JSON, for a program that waits for it."""
    servers = {each.name: {"url": each.url, "type": each.kind} for each in services}
    return orjson.dumps({"head": head_url, "pid": os.getpid(), "model": model, "servers": servers}).decode()


def _format_addresses(head_url: str, services: Sequence[Service], model: str) -> Iterator[str]:
    width = max((len(each.name) for each in services), default=4)
    yield f"{'head':<{width}}  {head_url}"
    for each in services:
        yield f"{each.name:<{width}}  {each.url}  {SERVER_LABELS[each.kind]}"
    yield f"Ready{_describe_policy(model)}. Press Ctrl-C to stop."


def _describe_policy(model: str) -> str:
    if model == ORACLE_MODEL:
        return f": {ORACLE_MODEL} plays, which knows the solutions; choose another model with --model"
    return f": {model} plays" if model else ""


async def build_curl_lines(environment: Environment, urls: Mapping[str, str], folder: Path) -> list[str]:
    """Build curl commands that play and judge one task of *environment*.

    Args:
        environment: The environment.
        urls: The URLs of the servers, by name.
        folder: Where to write the bodies that the commands send.
    """
    from functools import partial

    from gymsdk.episode import Budget, play
    from gymsdk.errors import GymsdkError
    from gymsdk.models import scripted
    from gymsdk.rollouts.jobs import build_input_row
    from gymsdk.rollouts.tasks import get_default_split
    from gymsdk.threads import ThreadPool

    try:
        tasks = environment.tasks(get_default_split(environment), seed=0)
        # The servers run on this loop, so waiting for a task must not block it.
        task = await ThreadPool().run(partial(next, tasks, None), timeout=EXAMPLE_SECONDS)
    except (GymsdkError, TimeoutError) as error:
        return [f"# {environment.name} has no task to try: {error}"]
    if task is None:
        return [f"# {environment.name} has no task to try: its split {get_default_split(environment)!r} is empty"]
    row = build_input_row(task.row(), environment=environment.name, task=0, sampling={})
    rollout = await play(environment, scripted.build("oracle"), row, budget=Budget(seconds=EXAMPLE_SECONDS))
    return [f"# {environment.name}", *_format_requests(environment.name, urls, folder, row, rollout)]


def _format_requests(name: str, urls: Mapping[str, str], folder: Path, row: Row, rollout: Rollout) -> Iterator[str]:
    from gymsdk import responses
    from gymsdk.deploy.plan import get_agent_name

    response = rollout.response or responses.build_response([], model="")
    jar, base = shlex.quote(str(folder / f"{name}.cookies")), urls[name]
    body = _write_body(folder / f"{name}.json", row)
    yield _format_curl(f"-c {jar}", body, f"{base}/seed_session")
    for call in response["output"]:
        if call.get("type") == "function_call":
            yield _format_curl(f"-b {jar} -c {jar}", shlex.quote(call["arguments"]), f"{base}/{call['name']}")
    verify_body = _write_body(folder / f"{name}.verify.json", {**row, "response": response})
    yield _format_curl(f"-b {jar} -c {jar}", verify_body, f"{base}/verify")
    yield _format_curl("", body, f"{urls[get_agent_name(name)]}/run")


def _write_body(path: Path, body: Row) -> str:
    from gymsdk import jsonl

    path.write_bytes(jsonl.dump_row(body))
    return shlex.quote(f"@{path}")


def _format_curl(cookies: str, body: str, url: str) -> str:
    words = ["curl -sS", cookies, "-H 'content-type: application/json' -d", body, shlex.quote(url)]
    return f"{' '.join(word for word in words if word)}; echo"
