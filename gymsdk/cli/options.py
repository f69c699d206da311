"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.errors import UsageError, format_name
from gymsdk.settings import OUTPUT, SETTINGS

if TYPE_CHECKING:
    from gymsdk.cli.fields import Given
    from gymsdk.models.options import ModelOptions
    from gymsdk.rollouts.settings import Sampling


Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a setting of the environment; NAME.KEY=VALUE with several environments.",
        show_default=False,
        rich_help_panel=SETTINGS,
    ),
]
OptionalNames = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Name one or more environments.", show_default=False)
]
# Not paths: a name may be that of a built-in file.
Configs = Annotated[
    list[str],
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read this configuration file; later files take precedence.",
        show_default=False,
        rich_help_panel=SETTINGS,
    ),
]
# The commands that another command starts end with it.
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", rich_help_panel=OUTPUT)]


def parse_settings(names: Sequence[str], pairs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse the values of `--set`, which are `KEY=VALUE` or, with several environments, `NAME.KEY=VALUE`.

    Args:
        pairs: The values of `--set`.

    Returns:
        The settings of each environment.

    Raises:
        UsageError: A value is malformed or names no environment.
    """
    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair in pairs:
        path, equals, value = pair.partition("=")
        name = next((name for name in names if path.startswith(f"{name}.")), names[0] if len(settings) == 1 else None)
        if name is None or not equals or not path:
            form = "KEY=VALUE" if len(settings) == 1 else f"NAME.KEY=VALUE with NAME one of {', '.join(settings)}"
            raise UsageError(f"--set {format_name(path)}: write it as {form}")
        settings[name][path.removeprefix(f"{name}.")] = _parse_value(path, value)
    return settings


def _parse_json(text: str) -> Any:
    from gymsdk import jsonl

    return jsonl.parse_json(text, strict=True)


def _parse_value(path: str, text: str) -> Any:
    """Return lists, objects and null parsed as JSON; other values stay text, which pydantic converts."""
    if text[:1] in {"[", "{"} or text == "null":
        try:
            return _parse_json(text)
        except ValueError as error:
            raise UsageError(
                f"--set {format_name(path)}: the value is not valid JSON ({error}); check its brackets and quotes"
            ) from None
    return text


def parse_pins(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse the `KEY=VALUE` pairs of `--pin`. A value that is not JSON is text.

    Raises:
        UsageError: A pair is malformed, or its key is reserved.
    """
    return dict(map(_parse_pin, pairs))


def _parse_pin(pair: str) -> tuple[str, Any]:
    key, value = _split_pair(pair, "--pin", "KEY=VALUE, as in --pin temperature=1.0", "every request")
    try:
        return key, _parse_json(value)
    except ValueError:
        return key, value


def _parse_param(pair: str) -> tuple[str, Any]:
    key, value = _split_pair(pair, "--param", "KEY=JSON, as in --param seed=7", "the host")
    try:
        return key, _parse_json(value)
    except ValueError:
        name = format_name(key)
        raise UsageError(
            f"--param {name}: the value is not valid JSON; put text in quotes, as in {name}='\"TEXT\"'"
        ) from None


def _split_pair(pair: str, option: str, form: str, setter: str) -> tuple[str, str]:
    from gymsdk.models.options import REQUEST_FIELDS

    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"{option} {format_name(key)}: write it as {form}")
    if key in REQUEST_FIELDS:
        raise UsageError(f"{option} {format_name(key)}: {setter} sets {key!r} itself; leave it out")
    return key, value


def build_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the request parameters of the options.

    Raises:
        UsageError: A value of `--param` is malformed, or its key is reserved.
    """
    named = sampling.model_dump(exclude={"params"}, exclude_none=True)
    return named | dict(map(_parse_param, sampling.params))


def read_model_options(given: Given[ModelOptions]) -> dict[str, Any]:
    """Return the options of the model that the user has set, with the `KEY=VALUE` pairs of `--pin` parsed.

    Raises:
        UsageError: A pair is malformed, or its key is reserved.
    """
    return {**given, **({"pinned": parse_pins(given["pinned"])} if "pinned" in given else {})}
