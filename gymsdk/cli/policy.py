"""`gymsdk policy serve`: serve a scripted policy as an OpenAI-compatible endpoint, to try trainers and agents."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import typer
from pydantic import BaseModel, Field

from gymsdk.cli import options
from gymsdk.cli.fields import Changed, Given, Only, take_models
from gymsdk.cli.group import Command, create_group
from gymsdk.cli.output import echo
from gymsdk.errors import UsageError
from gymsdk.rollouts.settings import Rows
from gymsdk.settings import FORMAT, NETWORK, SECURITY, TASKS, Flag
from gymsdk.testing.faults import Faults

if TYPE_CHECKING:
    from gymsdk.types import Model

app = create_group()


class EndpointOptions(BaseModel):
    """The endpoint of the policy."""

    host: Annotated[str, Flag(NETWORK, "HOST")] = Field(
        "127.0.0.1", description="Listen on this host; a non-loopback host needs --insecure."
    )
    port: Annotated[int, Flag(NETWORK, "N")] = Field(
        8000, ge=0, le=65535, description="Listen on this port; 0 takes any free port."
    )
    name: Annotated[str, Flag(NETWORK, "NAME")] = Field("policy", description="Serve the model under this name.")
    insecure: Annotated[bool, Flag(SECURITY)] = Field(
        False, description="Allow everyone who reaches the host to use the endpoint."
    )
    reasoning: Annotated[Literal["field", "tags", "none"], Flag(FORMAT)] = Field(
        "field", description="Return reasoning in a field, in tags of the text, or not at all."
    )
    kind: Annotated[
        Literal["vllm", "vllm-completions", "nemo-rl", "sglang", "plain"], Flag(FORMAT, names=("--engine",))
    ] = Field("vllm", description="Take and return token ids as this inference engine does. plain returns none.")
    template: Annotated[
        Literal["chatml", "qwen", "strip", "drop-empty", "gemma", "mistral", "eos-only"],
        Flag(FORMAT, names=("--chat-template",)),
    ] = Field("chatml", description="Render prompts in this style.")
    pairs: Annotated[bool, Flag(FORMAT)] = Field(
        False, description="Give pairs of letters tokens of their own, and split some of them, as real policies do."
    )


def build_faults(**fields: Any) -> Faults:
    """Build the faults that the options describe. Raises `UsageError` if they are invalid."""
    from pydantic import ValidationError

    from gymsdk.errors import format_error_detail, format_error_location

    try:
        return Faults(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        option = format_error_location(first)
        raise UsageError(
            f"--{option}: {format_error_detail(first)}"
            if option
            else f"{format_error_detail(first)}; lower one of them"
        ) from None


@app.callback()
def _policy() -> None:
    """Serve a scripted policy as an OpenAI-compatible endpoint."""


@dataclass(frozen=True, slots=True)
class _PolicyOptions:
    """The policy to serve and the tasks that its oracle knows."""

    kind: str
    env: tuple[str, ...]
    settings: tuple[str, ...]
    rows: Rows

    def check(self) -> None:
        """Raise `UsageError` if the oracle lacks an environment, or another policy has options of the oracle."""
        if self.kind.partition(":")[0] == "oracle":
            if not self.env:
                raise UsageError("the oracle needs the environments whose tasks it solves; name them with --env")
            return
        oracle_options = {
            "env": self.env,
            "split": self.rows.split,
            "tasks": self.rows.tasks,
            "set": self.settings,
            "limit": self.rows.limit,
        }
        if extra := next((option for option, value in oracle_options.items() if value), None):
            raise UsageError(f"--{extra} applies to the oracle only, and {self.kind} does not read tasks; leave it out")


@app.command(cls=Command)
@take_models
def serve(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="oracle[:SHARE]|null|echo|random|script:FILE|replay:FILE",
            help="Choose the policy.",
            show_default=False,
        ),
    ],
    *,
    env: Annotated[
        list[str],
        typer.Option(
            "--env",
            metavar="NAME",
            help="Let the oracle solve the tasks of this environment; can be repeated.",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = [],  # noqa: B006  # typer copies it
    rows: Annotated[
        Rows,
        Only("split", "tasks", "limit", "seed"),
        Changed(
            split={"help": "Let the oracle solve the rows of this split. By default, of all splits."},
            limit={"help": "Let the oracle read at most N rows. By default, 10,000."},
        ),
    ],
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    endpoint: EndpointOptions,
    given: Given[Faults],
    json: options.Json = False,
) -> None:
    """Serve a scripted policy until Ctrl-C, over Chat Completions, Responses and Messages, also streamed.

    Examples:
        gymsdk policy serve oracle --env math
        gymsdk policy serve random --latency 0.1-0.5 --errors 0.05
    """
    from gymsdk.cli.process import Stopped, run_until_signal
    from gymsdk.cli.progress import show_warnings

    faults = build_faults(**given, seed=rows.seed)
    if not endpoint.name.strip():
        raise UsageError("--name is empty; pass the name that clients send as `model`")
    # Other commands write the same policy as `--model scripted/NAME`.
    kind = kind.removeprefix("scripted/")
    policy_options = _PolicyOptions(kind, tuple(env), tuple(settings), rows)
    policy_options.check()
    address = endpoint.model_dump(include={"host", "port", "insecure"})
    served = endpoint.model_dump(exclude={*address}) | {"faults": faults}
    announce = _Announcer(policy_options, endpoint.name, json=json)
    try:
        with show_warnings():
            run_until_signal(_serve_policy(policy_options, served, announce, address))
    except Stopped as stop:
        # Ctrl-C is the regular way to stop a server, so the exit code is 0 once it has been ready.
        raise typer.Exit(0 if announce.ready else stop.code) from None


@asynccontextmanager
async def _build_policy(policy_options: _PolicyOptions) -> AsyncIterator[Model]:
    """Open the policy. The oracle reads the tasks of the environments first."""
    from gymsdk.models import registry as models
    from gymsdk.plugins import registry
    from gymsdk.testing import oracle

    model = models.model(f"scripted/{policy_options.kind}")
    if not policy_options.env:
        yield model
        return
    settings = options.parse_settings(policy_options.env, policy_options.settings)
    environments = {name: registry.load(name, **values) for name, values in settings.items()}
    async with oracle.open_oracle(
        environments,
        model,
        split=policy_options.rows.split,
        tasks=policy_options.rows.tasks,
        limit=policy_options.rows.limit,
        seed=policy_options.rows.seed,
    ) as oracle_model:
        yield oracle_model


class _Announcer:
    """Prints the address of the endpoint once it is ready, and sets *ready*."""

    def __init__(self, policy_options: _PolicyOptions, name: str, *, json: bool) -> None:
        self.ready = False
        self._policy_options = policy_options
        self._name = name
        self._json = json

    def __call__(self, url: str) -> None:
        line = orjson.dumps({"url": url, "pid": os.getpid(), "model": self._name}).decode()
        echo(line if self._json else self._format_text(url))
        self.ready = True

    def _format_text(self, url: str) -> str:
        names = " ".join(self._policy_options.env) or "math"
        return (
            f"{self._name}  {url}  scripted/{self._policy_options.kind}\n"
            f"Try: GYMSDK_BASE_URL={url} gymsdk rollout {names} --model vllm/{self._name}\n"
            f"     OPENAI_BASE_URL={url} ANTHROPIC_BASE_URL={url.removesuffix('/v1')}; any API key works\n"
            "Ready. Press Ctrl-C to stop."
        )


async def _serve_policy(
    policy_options: _PolicyOptions, endpoint: dict[str, Any], announce: _Announcer, address: dict[str, Any]
) -> None:
    import asyncio

    from gymsdk import testing

    async with (
        _build_policy(policy_options) as model,
        testing.serve(testing.build_app(model, **endpoint), **address) as url,
    ):
        announce(url)
        await asyncio.Event().wait()
