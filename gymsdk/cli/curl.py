"""Curl lines that open, play and judge one task of a served environment, to be pasted as they are."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from gymsdk import rows, wire
from gymsdk.environment import Environment
from gymsdk.errors import GymsdkError
from gymsdk.launch import agent_of
from gymsdk.models import scripted
from gymsdk.outcome import Rollout
from gymsdk.rollouts.jobs import stamped
from gymsdk.rollouts.sources import default_split
from gymsdk.sitting import Budget
from gymsdk.transcript import Item
from gymsdk.types import Row
from gymsdk.workers.threads import Threads

PATIENCE = Budget(seconds=10.0)
"""What playing the example may take."""


async def lines(environment: Environment, urls: Mapping[str, str], folder: Path) -> list[str]:
    """Give the lines for *environment*, the bodies they send written to *folder*."""
    from gymsdk.episode import play

    try:
        tasks = environment.tasks(default_split(environment), seed=0)
        # Servers answer on this loop, which the wait for a task must not hold up.
        task = await Threads().run(partial(next, tasks, None), timeout=PATIENCE.seconds)
    except (GymsdkError, TimeoutError) as error:
        return [f"# {environment.name} has no task to try: {error}"]
    if task is None:
        return [f"# {environment.name} has no task to try: its split {default_split(environment)!r} is empty"]
    row = stamped(task.row(), environment=environment.name, task=0, sampling={})
    rollout = await play(environment, scripted.build("oracle"), row, budget=PATIENCE)
    return [f"# {environment.name}", *_lines(environment.name, urls, folder, row, rollout)]


def _lines(name: str, urls: Mapping[str, str], folder: Path, row: Row, rollout: Rollout) -> Iterator[str]:
    response = rollout.response or wire.response([], model="")
    jar, base = folder / f"{name}.cookies", urls[name]
    cookies = f"-b {shlex.quote(str(jar))} -c {shlex.quote(str(jar))}"
    body = _written(folder / f"{name}.json", row)
    yield _curl(f"-c {shlex.quote(str(jar))}", body, f"{base}/seed_session")
    for call in _calls(response):
        yield _curl(cookies, shlex.quote(call["arguments"]), f"{base}/{call['name']}")
    judged = _written(folder / f"{name}.verify.json", {**row, "response": response})
    yield _curl(cookies, judged, f"{base}/verify")
    yield _curl("", body, f"{urls[agent_of(name)]}/run")


def _calls(response: Item) -> list[Item]:
    return [item for item in response["output"] if item.get("type") == "function_call"]


def _written(path: Path, body: Row) -> str:
    path.write_bytes(rows.line(body))
    return shlex.quote(f"@{path}")


def _curl(cookies: str, body: str, url: str) -> str:
    words = ["curl -sS", cookies, "-H 'content-type: application/json' -d", body, shlex.quote(url), "; echo"]
    return " ".join(word for word in words if word).replace(" ; ", "; ")
