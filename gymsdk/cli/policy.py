"""`gymsdk policy serve`: a scripted policy in the place of an engine, to try trainers and agents with."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import orjson
import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.testing.faults import Faults


def _share_option(words: str) -> Any:
    return typer.Option(min=0, max=1, metavar="SHARE", callback=options.check_finite, help=words)


Reasoning = Annotated[Literal["field", "tags", "none"], typer.Option(help="How a chat is told thoughts.")]
Bundles = Annotated[
    bool, typer.Option("--bundles", help="Put token ids on a chat's message, as NeMo RL's server does.")
]
Latency = Annotated[
    str,
    typer.Option(metavar="SECONDS", help="What an answer takes: 0.2, 0.1-0.5, exp:MEAN, lognormal:MEDIAN:SIGMA."),
]
Errors = Annotated[float, _share_option("Requests answered 500, 502 or 503.")]
RateLimited = Annotated[float, _share_option("Requests answered 429.")]
Disconnects = Annotated[float, _share_option("Connections cut before or in the answer.")]
Malformed = Annotated[float, _share_option("Answers whose first call has half of its arguments.")]
Truncated = Annotated[float, _share_option("Streams that end too early.")]
ContextLength = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Tokens that a prompt and its answer may have.")
]
Unparsed = Annotated[
    bool, typer.Option("--unparsed", help="Leave tool calls in the text, as with the wrong parser of calls.")
]
RefuseTools = Annotated[bool, typer.Option("--refuse-tools", help="Refuse tools, as without a parser of calls.")]


def build_faults(**given: Any) -> Faults:
    """Give the faults that the options ask for; raises `UsageError` where they do not fit."""
    from pydantic import ValidationError

    from gymsdk.errors import format_error_detail, format_error_location
    from gymsdk.testing.faults import Faults

    try:
        return Faults(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = format_error_location(first)
        raise UsageError(
            f"--{where}: {format_error_detail(first)}" if where else f"{format_error_detail(first)}; lower one of them"
        ) from None


if TYPE_CHECKING:
    from gymsdk.types import Model

app = typer.Typer(help="Serve a scripted policy as an engine would be.", no_args_is_help=True)
POLICY_SYNTAX = "oracle[:SHARE]|null|echo|random|script:FILE|replay:FILE"


@app.callback()
def _policy() -> None:
    """Serve a scripted policy as an engine would be."""


@dataclass(frozen=True, slots=True)
class _PolicyOptions:
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
    kind: Annotated[str, typer.Argument(metavar=POLICY_SYNTAX, help="Who plays.", show_default=False)],
    *,
    env: Annotated[
        list[str],
        typer.Option("--env", metavar="NAME", help="An environment whose tasks the oracle knows.", show_default=False),
    ] = [],  # noqa: B006  # typer copies it
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="The split whose rows the oracle knows; all, if not given.")
    ] = None,
    tasks: options.Tasks = None,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows the oracle reads at most; 10,000, if not given.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Where to listen; beyond loopback with --insecure.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0 is any.")] = 8000,
    name: Annotated[str, typer.Option(metavar="NAME", help="What the model is called.")] = "policy",
    insecure: Annotated[bool, typer.Option("--insecure", help="Let anybody who reaches the host use it.")] = False,
    reasoning: Reasoning = "field",
    bundles: Bundles = False,
    latency: Latency = "0",
    errors: Errors = 0.0,
    limited: RateLimited = 0.0,
    cuts: Disconnects = 0.0,
    malformed: Malformed = 0.0,
    truncated: Truncated = 0.0,
    context: ContextLength = None,
    unparsed: Unparsed = False,
    refuse_tools: RefuseTools = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Serve a scripted policy until Ctrl-C: Chat Completions, Responses and Messages, streamed or not."""
    ordered = build_faults(
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
    asked = _PolicyOptions(
        kind=kind, env=tuple(env), split=split, tasks=tasks, settings=tuple(settings), limit=limit, seed=seed
    )
    asked.check()
    engine = {"name": name, "faults": ordered, "reasoning": reasoning, "bundles": bundles}
    shown = _Announcer(asked, name, out=sys.stdout, json=json)
    _serve(asked, engine, shown, {"host": host, "port": port, "insecure": insecure})


@asynccontextmanager
async def _build_policy(asked: _PolicyOptions) -> AsyncIterator[Model]:
    """Give the policy; the oracle with environments, whose rows it reads."""
    from gymsdk.models import registry as models
    from gymsdk.plugins import registry
    from gymsdk.testing import oracle

    player = models.model(f"scripted/{asked.kind}")
    if not asked.env:
        yield player
        return
    given = options.parse_settings(asked.env, asked.settings)
    environments = {name: registry.load(name, **each) for name, each in given.items()}
    async with oracle.opened(
        environments, player, split=asked.split, tasks=asked.tasks, limit=asked.limit, seed=asked.seed
    ) as found:
        yield found


class _Announcer:
    """Tells on *out* what is served, once it is; *ready* says that it has."""

    def __init__(self, asked: _PolicyOptions, name: str, *, out: TextIO, json: bool) -> None:
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


def _serve(asked: _PolicyOptions, engine: dict[str, Any], shown: _Announcer, where: dict[str, Any]) -> None:
    from contextlib import redirect_stdout

    from gymsdk.cli.rollout import show_warnings
    from gymsdk.cli.stopping import Stopped, run_until_signal

    try:
        # What an author's code prints must not mix with what a program reads.
        with show_warnings(), redirect_stdout(sys.stderr):
            run_until_signal(_serve_policy(asked, engine, shown, where))
    except Stopped as stop:
        # A server is there to be stopped: once it has been ready, that went well.
        raise typer.Exit(0 if shown.ready else stop.code) from None


async def _serve_policy(
    asked: _PolicyOptions, engine: dict[str, Any], shown: _Announcer, where: dict[str, Any]
) -> None:
    import asyncio

    from gymsdk import testing

    async with _build_policy(asked) as player, testing.serve(testing.app(player, **engine), **where) as url:
        shown(url)
        await asyncio.Event().wait()
