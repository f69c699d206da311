"""Faults: the options by which a served policy is like an engine that is not all well, and what they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.servers.policy import Faults


def _share(words: str) -> Any:
    return typer.Option(min=0, max=1, metavar="SHARE", callback=options.finite, help=words)


Reasoning = Annotated[Literal["field", "tags", "none"], typer.Option(help="How a chat is told thoughts.")]
Bundles = Annotated[
    bool, typer.Option("--bundles", help="Put token ids on a chat's message, as NeMo RL's server does.")
]
Latency = Annotated[
    str,
    typer.Option(metavar="SECONDS", help="What an answer takes: 0.2, 0.1-0.5, exp:MEAN, lognormal:MEDIAN:SIGMA."),
]
Errors = Annotated[float, _share("Requests answered 500, 502 or 503.")]
Limited = Annotated[float, _share("Requests answered 429.")]
Cuts = Annotated[float, _share("Connections cut before or in the answer.")]
Malformed = Annotated[float, _share("Answers whose first call has half of its arguments.")]
Truncated = Annotated[float, _share("Streams that end too early.")]
Context = Annotated[int | None, typer.Option(min=2, metavar="N", help="Tokens that a prompt and its answer may have.")]
Unparsed = Annotated[
    bool, typer.Option("--unparsed", help="Leave tool calls in the text, as with the wrong parser of calls.")
]
RefuseTools = Annotated[bool, typer.Option("--refuse-tools", help="Refuse tools, as without a parser of calls.")]


def faults(**given: Any) -> Faults:
    """Give the faults that the options ask for; raises `UsageError` where they do not fit."""
    from pydantic import ValidationError

    from gymsdk.complaints import place, said
    from gymsdk.servers.policy import Faults

    try:
        return Faults(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = place(first)
        raise UsageError(f"--{where}: {said(first)}" if where else f"{said(first)}; lower one of them") from None
