"""What several commands take: settings, sampling parameters, models, read from the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import orjson
import typer

from gymsdk import wire
from gymsdk.errors import UsageError

Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the environment (NAME.KEY=VALUE with several).",
        show_default=False,
    ),
]
Model = Annotated[str, typer.Option("--model", help="PROVIDER/NAME: scripted/oracle, vllm/…, endpoint/…, openai/….")]
BaseUrl = Annotated[str | None, typer.Option(help="The model server's address, as in http://127.0.0.1:8000/v1.")]
Api = Annotated[wire.Api | None, typer.Option(help="What the model server speaks: chat or responses.")]
Seed = Annotated[int, typer.Option(help="Decides the generated rows, every episode and every scripted answer.")]
Split = Annotated[str | None, typer.Option(help="The split to generate; `example` where there is one.")]


def settings(names: list[str], pairs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give each environment's settings out of `KEY=VALUE` or `NAME.KEY=VALUE`; raises `UsageError`."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair in pairs:
        path, equals, value = pair.partition("=")
        name, dot, key = path.partition(".")
        if not dot and len(names) == 1:
            name, key = names[0], path
        if not equals or name not in given or not key:
            wanted = "KEY=VALUE" if len(names) == 1 else f"NAME.KEY=VALUE with NAME one of {', '.join(names)}"
            raise UsageError(f"--set {pair}: write it as {wanted}")
        given[name][key] = _value(value)
    return given


def _value(text: str) -> Any:
    """Give lists, objects and null as JSON says them; pydantic reads numbers and truth values out of text."""
    if text[:1] in {"[", "{"} or text == "null":
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"--set …={text}: not valid JSON ({error})") from None
    return text


def sampling(
    *, temperature: float | None, top_p: float | None, max_output_tokens: int | None, params: Iterable[str]
) -> dict[str, Any]:
    """Give the sampling parameters that go over each row's own; raises `UsageError`."""
    plain = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    given: dict[str, Any] = {key: value for key, value in plain.items() if value is not None}
    for pair in params:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--param {pair}: write it as KEY=JSON, as in --param seed=7")
        try:
            given[key] = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise UsageError(
                f"--param {pair}: the value is no JSON; a text needs quotes, as in {key}='\"{value}\"'"
            ) from None
    return given
