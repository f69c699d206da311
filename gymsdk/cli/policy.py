"""`gymsdk policy serve`: a scripted policy in the place of an engine, to try trainers and agents with."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import orjson
import typer

from gymsdk.cli import faults, options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.types import Model

app = typer.Typer(help="Serve a scripted policy as an engine would be.", no_args_is_help=True)
KINDS = "oracle[:SHARE]|null|echo|random|script:FILE|replay:FILE"


@app.callback()
def _policy() -> None:
    """Serve a scripted policy as an engine would be."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who is to play, and what of an environment the oracle is to know."""

    kind: str
    env: tuple[str, ...]
    split: str | None
    tasks: Path | None
    settings: tuple[str, ...]
    limit: int | None
    seed: int

    def check(self) -> None:
        """Refuse an oracle without an environment, and an environment without the oracle; raises `UsageError`."""
        if self.kind.partition(":")[0] == "oracle":
            if not self.env:
                raise UsageError("the oracle knows the answers of an environment's tasks; name it with --env")
            return
        given = {"env": self.env, "split": self.split, "tasks": self.tasks, "set": self.settings, "limit": self.limit}
        if named := next((option for option, value in given.items() if value), None):
            raise UsageError(f"--{named} is the oracle's, and {self.kind} knows no tasks; leave it out")


@app.command()
def serve(  # noqa: PLR0913  # each is an option of the command
    kind: Annotated[str, typer.Argument(metavar=KINDS, help="Who plays.", show_default=False)],
    *,
    env: Annotated[
        list[str],
        typer.Option("--env", metavar="NAME", help="An environment whose tasks the oracle knows.", show_default=False),
    ] = [],  # noqa: B006  # typer copies it
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="The split whose rows the oracle knows; all, if not given.")
    ] = None,
    tasks: options.Tasks = None,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows the oracle reads at most; 10,000, if not given.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen; beyond loopback with --insecure.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0 is any.")] = 8000,
    name: Annotated[str, typer.Option(metavar="NAME", help="What the model is called.")] = "policy",
    insecure: Annotated[bool, typer.Option("--insecure", help="Let anybody who reaches the host use it.")] = False,
    reasoning: faults.Reasoning = "field",
    bundles: faults.Bundles = False,
    latency: faults.Latency = "0",
    errors: faults.Errors = 0.0,
    limited: faults.Limited = 0.0,
    cuts: faults.Cuts = 0.0,
    malformed: faults.Malformed = 0.0,
    truncated: faults.Truncated = 0.0,
    context: faults.Context = None,
    unparsed: faults.Unparsed = False,
    refuse_tools: faults.RefuseTools = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Serve a scripted policy until Ctrl-C: Chat Completions, Responses and Messages, streamed or not."""
    ordered = faults.faults(
        latency=latency,
        errors=errors,
        limited=limited,
        cuts=cuts,
        malformed=malformed,
        truncated=truncated,
        context=context,
        unparsed=unparsed,
        refuses_tools=refuse_tools,
        seed=seed,
    )
    if not name.strip():
        raise UsageError("--name is empty; say what the model is called")
    kind = kind.removeprefix("scripted/")
    asked = _Asked(
        kind=kind, env=tuple(env), split=split, tasks=tasks, settings=tuple(settings), limit=limit, seed=seed
    )
    asked.check()
    engine = {"name": name, "faults": ordered, "reasoning": reasoning, "bundles": bundles}
    shown = _Shown(asked, name, out=sys.stdout, json=json)
    _serve(asked, engine, shown, {"host": host, "port": port, "insecure": insecure})


@asynccontextmanager
async def _player(asked: _Asked) -> AsyncIterator[Model]:
    """Give the policy; the oracle with environments, whose rows it reads."""
    from gymsdk import oracle
    from gymsdk.models import registry as models
    from gymsdk.plugins import registry

    player = models.model(f"scripted/{asked.kind}")
    if not asked.env:
        yield player
        return
    given = options.settings(asked.env, asked.settings)
    environments = {name: registry.load(name, **each) for name, each in given.items()}
    async with oracle.opened(
        environments, player, split=asked.split, tasks=asked.tasks, limit=asked.limit, seed=asked.seed
    ) as found:
        yield found


class _Shown:
    """Tells on *out* what is served, once it is; *ready* says that it has."""

    def __init__(self, asked: _Asked, name: str, *, out: TextIO, json: bool) -> None:
        self.ready = False
        self._asked = asked
        self._name = name
        self._out = out
        self._json = json

    def __call__(self, url: str) -> None:
        line = orjson.dumps({"url": url, "pid": os.getpid(), "model": self._name}).decode()
        typer.echo(line if self._json else self._said(url), file=self._out)
        self._out.flush()
        self.ready = True

    def _said(self, url: str) -> str:
        names = " ".join(self._asked.env) or "math"
        return (
            f"{self._name}  {url}  scripted/{self._asked.kind}\n"
            f"Try: GYMSDK_BASE_URL={url} gymsdk rollout {names} --model vllm/{self._name}\n"
            f"     OPENAI_BASE_URL={url} ANTHROPIC_BASE_URL={url.removesuffix('/v1')}; any key will do\n"
            "Ready. Ctrl-C ends it."
        )


def _serve(asked: _Asked, engine: dict[str, Any], shown: _Shown, where: dict[str, Any]) -> None:
    from contextlib import redirect_stdout

    from gymsdk.cli.running import warnings
    from gymsdk.cli.stopping import Stopped, until_stopped

    try:
        # What an author's code prints must not mix with what a program reads.
        with warnings(), redirect_stdout(sys.stderr):
            until_stopped(_served(asked, engine, shown, where))
    except Stopped as stop:
        # A server is there to be stopped: once it has been ready, that went well.
        raise typer.Exit(0 if shown.ready else stop.code) from None


async def _served(asked: _Asked, engine: dict[str, Any], shown: _Shown, where: dict[str, Any]) -> None:
    import asyncio

    from gymsdk.servers import policy

    async with _player(asked) as player, policy.serve(policy.app(player, **engine), **where) as url:
        shown(url)
        await asyncio.Event().wait()
