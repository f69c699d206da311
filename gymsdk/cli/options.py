"""What several commands take: settings, sampling parameters, models, read from the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gymsdk import credentials, values, wire
from gymsdk.errors import UsageError

TAKEN = frozenset({"input", "messages", "stream", "tools"})
"""Request parameters that are the host's own."""


def finite(value: float | None) -> float | None:
    """Give *value* where it is a finite number; what an option's callback raises where it is none."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def head(value: str | None) -> str | None:
    """Give the URL of a head; raises `UsageError` where it is none, or says who asks."""
    return None if value is None else credentials.head(value)


def _small(value: int) -> int:
    if value.bit_length() > 63:  # noqa: PLR2004  # what a JSON reader holds exactly
        raise typer.BadParameter("a seed has at most 63 bits")
    return value


Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the environment (NAME.KEY=VALUE with several).",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(metavar="PROVIDER/NAME", help="Who plays: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME."),
]
ModelIfAny = Annotated[
    str | None,
    typer.Option(
        metavar="PROVIDER/NAME",
        help="Who plays: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME.",
        show_default="scripted/oracle",
    ),
]
Names = Annotated[list[str], typer.Argument(metavar="NAME", help="One or more environments.", show_default=False)]
NamesIfAny = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="One or more environments.", show_default=False)
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Take this many tasks of the file, or of each split (there 100 if not given)."
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        metavar="URL", callback=head, help="The head of running servers that do it, as in http://127.0.0.1:11000."
    ),
]
BaseUrl = Annotated[
    list[str],
    typer.Option(
        metavar="URL",
        help="The model server's address, as in http://127.0.0.1:8000/v1; again for each of its replicas.",
        show_default=False,
    ),
]
Api = Annotated[wire.Api | None, typer.Option(help="What the model server speaks.")]
Pin = Annotated[
    list[str],
    typer.Option(
        "--pin",
        metavar="KEY=VALUE",
        help="A key of every call to the model server, whatever the request says; null leaves it out.",
        show_default=False,
    ),
]
TokenIds = Annotated[
    bool, typer.Option("--token-ids", help="Ask the model server for token ids and log-probabilities.")
]
Tasks = Annotated[Path | None, typer.Option(metavar="FILE", help="A JSONL file of task rows, instead of a split.")]
Split = Annotated[
    str | None, typer.Option(metavar="NAME", help="The split to play; `example` or the first one, if not given.")
]
Repeats = Annotated[int, typer.Option("--repeats", "-k", min=1, metavar="K", help="Play each task this often.")]
RepeatsIfAny = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        "-k",
        min=1,
        metavar="K",
        help="Play each task this often.",
        show_default="1, or what the dataset says",
    ),
]
Configs = Annotated[
    list[Path],
    typer.Option("--config", metavar="FILE", help="A configuration; later ones win.", show_default=False),
]
Dataset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Play the rows that a configuration names so, instead of a split."),
]
Agent = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With --head: the agent that plays rows which name none."),
]
Concurrency = Annotated[int, typer.Option(min=1, metavar="C", help="Episodes in flight at once.")]
Seed = Annotated[
    int,
    typer.Option(metavar="S", callback=_small, help="Decides generated rows, episodes and scripted answers."),
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, metavar="T", callback=finite, help="The model's sampling temperature.")
]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, metavar="P", callback=finite, help="The model's nucleus, from 0 to 1."),
]
MaxOutputTokens = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens one answer of the model may have.")
]
Param = Annotated[
    list[str],
    typer.Option("--param", metavar="KEY=JSON", help="A further request parameter.", show_default=False),
]
Turns = Annotated[int, typer.Option(min=1, metavar="N", help="Model calls an episode may make.")]
ToolCalls = Annotated[int, typer.Option(min=0, metavar="N", help="Tool calls an episode may make.")]
Deadline = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", callback=finite, help="How long an episode may take.")
]
Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", callback=finite, help="How long a model call may take.")
]
Attempts = Annotated[int, typer.Option(min=1, metavar="N", help="Tries of an episode that failed.")]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out rows that do not fit.")]
Trajectories = Annotated[
    bool, typer.Option("--trajectories", help="Add NeMo Gym's `ng_trajectory` to each line of rollouts.jsonl.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="The folder to write.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def settings(names: Sequence[str], pairs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give each environment's settings out of `KEY=VALUE` or `NAME.KEY=VALUE`; raises `UsageError`."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair in pairs:
        path, equals, value = pair.partition("=")
        name = next((name for name in names if path.startswith(f"{name}.")), names[0] if len(given) == 1 else None)
        if name is None or not equals or not path:
            wanted = "KEY=VALUE" if len(given) == 1 else f"NAME.KEY=VALUE with NAME one of {', '.join(given)}"
            raise UsageError(f"--set {pair}: write it as {wanted}")
        given[name][path.removeprefix(f"{name}.")] = _value(pair, value)
    return given


def _value(pair: str, text: str) -> Any:
    """Give lists, objects and null as JSON says them; pydantic reads numbers and truth values out of text."""
    if text[:1] in {"[", "{"} or text == "null":
        try:
            return values.parsed(text, strict=True)
        except ValueError as error:
            raise UsageError(f"--set {pair}: the value is no JSON ({error}); mend its brackets and quotes") from None
    return text


def pinned(pairs: Iterable[str]) -> dict[str, Any]:
    """Give what `KEY=VALUE` pins, a value read as JSON or else as text; raises `UsageError`."""
    return dict(map(_pin, pairs))


def _pin(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--pin {pair}: write it as KEY=VALUE, as in --pin temperature=1.0")
    if key in TAKEN:
        raise UsageError(f"--pin {pair}: {key!r} is the caller's to say; leave it out")
    try:
        return key, values.parsed(value, strict=True)
    except ValueError:
        return key, value


def addresses(given: Sequence[str]) -> str | None:
    """Give the addresses of a model's replicas as one text, `None` where there are none."""
    return ",".join(given) or None


def sampling(
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    max_output_tokens: int | None = None,
    params: Iterable[str] = (),
) -> dict[str, Any]:
    """Give the sampling parameters that go over each row's own; raises `UsageError`."""
    plain = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    given: dict[str, Any] = {key: value for key, value in plain.items() if value is not None}
    return given | dict(map(_param, params))


def _param(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--param {pair}: write it as KEY=JSON, as in --param seed=7")
    if key in TAKEN:
        raise UsageError(f"--param {pair}: {key!r} is the host's to fill; leave it out")
    try:
        return key, values.parsed(value, strict=True)
    except ValueError:
        quoted = f"{key}='\"{value}\"'"
        raise UsageError(f"--param {pair}: the value is no JSON; a text needs quotes, as in {quoted}") from None
