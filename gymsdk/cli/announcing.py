"""What `gymsdk serve` says once its servers answer: where they are, who plays, what to try."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import typer

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.servers.nodes.service import Service
    from gymsdk.types import Model

KINDS = {
    "resources_servers": "resources",
    "responses_api_agents": "agent",
    "environment_servers": "environment server",
    "responses_api_models": "model",
}
"""What people call the servers."""

ORACLE = "scripted/oracle"


class Shown:
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
        player = _name(model, services)
        lines = [_line(head_url, services, player)] if self._json else [*_lines(head_url, services, player)]
        if self._tries and not self._json and folder is not None:
            from gymsdk.cli import curl

            urls = {each.name: each.url for each in services}
            for environment in environments:
                lines += ["", *await curl.lines(environment, urls, folder)]
        typer.echo("\n".join(lines), file=self._out)
        self._out.flush()
        self.ready = True


def _name(model: Model | str | None, services: Sequence[Service]) -> str:
    """Give who plays: as it is called here, or as its server says."""
    from gymsdk.addresses import public
    from gymsdk.launch import named

    if model is not None:
        return public(model) if isinstance(model, str) else named(model)
    told = (str(each.fields.get("model") or "") for each in services if each.kind == "responses_api_models")
    return next(told, "")


def _line(head_url: str, services: Sequence[Service], model: str) -> str:
    """Give what runs as one line of JSON, for a program that waits for it."""
    servers = {each.name: {"url": each.url, "type": each.kind} for each in services}
    return orjson.dumps({"head": head_url, "pid": os.getpid(), "model": model, "servers": servers}).decode()


def _lines(head_url: str, services: Sequence[Service], model: str) -> Iterator[str]:
    width = max((len(each.name) for each in services), default=4)
    yield f"{'head':<{width}}  {head_url}"
    for each in services:
        yield f"{each.name:<{width}}  {each.url}  {KINDS[each.kind]}"
    yield f"Ready{_player(model)}. Ctrl-C ends it."


def _player(model: str) -> str:
    if model == ORACLE:
        return f": {ORACLE} plays, which knows the answers; name another with --model"
    return f": {model} plays" if model else ""
