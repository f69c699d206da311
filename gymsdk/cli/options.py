"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gymsdk.errors import UsageError, format_name
from gymsdk.settings import LIMITS, MODEL, OUTPUT, RAY, RUN, SAMPLING, SETTINGS, TASKS

RESERVED_REQUEST_KEYS = frozenset({"input", "messages", "stream", "tools"})
"""Request parameters that the host sets for each request, and that users cannot set."""


def check_finite(value: float | None) -> float | None:
    """Return *value*, or raise `typer.BadParameter` if *value* is not finite. Used as an option callback."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def parse_head_url(value: str | None) -> str | None:
    """Return the URL of a head, or raise `UsageError` if it is invalid. Used as an option callback."""
    from gymsdk import credentials

    return None if value is None else credentials.check_head_url(value)


def _check_seed(value: int) -> int:
    if value.bit_length() > 63:  # noqa: PLR2004  # JSON readers represent 64-bit integers exactly
        raise typer.BadParameter("a seed has at most 63 bits")
    return value


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
ModelName = Annotated[
    str,
    typer.Option(
        metavar="PROVIDER/NAME",
        help="Play with this model: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME.",
        rich_help_panel=MODEL,
    ),
]
OptionalModelName = Annotated[
    str | None,
    typer.Option(
        metavar="PROVIDER/NAME",
        help="Play with this model: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME.",
        show_default="scripted/oracle",
        rich_help_panel=MODEL,
    ),
]
Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Name one or more environments.", show_default=False)]
OptionalNames = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Name one or more environments.", show_default=False)
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Play at most N tasks of the file, or of each environment's split (then 100 by default).",
        rich_help_panel=TASKS,
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        callback=parse_head_url,
        help="Use the running servers of this head, as in http://127.0.0.1:11000.",
        rich_help_panel=RUN,
    ),
]
BaseUrl = Annotated[
    list[str],
    typer.Option(
        metavar="URL",
        help="Call the model server at this address, as in http://127.0.0.1:8000/v1; repeat for replicas.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
# The literals repeat those of gymsdk.responses, because importing them would slow down every command.
Api = Annotated[
    Literal["chat", "responses"] | None, typer.Option(help="Choose the API of the model server.", rich_help_panel=MODEL)
]
Pin = Annotated[
    list[str],
    typer.Option(
        "--pin",
        metavar="KEY=VALUE",
        help="Set a key of every request to the model server; null removes the key.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
TokenIds = Annotated[
    bool,
    typer.Option(
        "--token-ids",
        help="Return token ids and log-probabilities for training, and keep conversations on exactly these ids.",
        rich_help_panel=MODEL,
    ),
]
TokenInterface = Annotated[
    Literal["vllm-generate", "vllm-completions", "sglang", "nemo-rl", "chat"] | None,
    typer.Option(
        "--token-interface",
        help="How the model server takes and returns token ids. By default, found out at the first call.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The model's tokenizer, for servers that do not tokenize: a name or a folder for transformers.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Tasks = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Read task rows from a JSONL file instead of a split.", rich_help_panel=TASKS),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Play this split. By default, play `example`, or the first split if there is no `example`.",
        rich_help_panel=TASKS,
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", "-k", min=1, metavar="K", help="Play each task K times.", rich_help_panel=TASKS)
]
OptionalRepeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        "-k",
        min=1,
        metavar="K",
        help="Play each task K times.",
        show_default="1, or the dataset's num_repeats",
        rich_help_panel=TASKS,
    ),
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
DatasetName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Play this dataset of the configuration instead of a split.", rich_help_panel=TASKS
    ),
]
Agent = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Let this agent of --head play rows that name no agent.", rich_help_panel=RUN),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto|local|none",
        help="Use this Ray cluster, the one of this machine, a new one, or none.",
        show_default="RAY_ADDRESS",
        rich_help_panel=RAY,
    ),
]
Replicas = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Let Ray run N replicas of the environments and agents on its nodes.",
        show_default=False,
        rich_help_panel=RAY,
    ),
]
CpusPerReplica = Annotated[
    float, typer.Option(min=0, metavar="N", help="Reserve N CPUs for a replica.", rich_help_panel=RAY)
]
GpusPerReplica = Annotated[
    float, typer.Option(min=0, metavar="N", help="Reserve N GPUs for a replica.", rich_help_panel=RAY)
]
Offload = Annotated[
    Literal["local", "inline", "ray"] | None,
    typer.Option(
        help="Run offloaded functions in local workers, in the calling thread, or on the Ray cluster.",
        show_default="ray with a cluster",
        rich_help_panel=RAY,
    ),
]
Concurrency = Annotated[
    int, typer.Option(min=1, metavar="C", help="Play up to C episodes concurrently.", rich_help_panel=RUN)
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="S",
        callback=_check_seed,
        help="Seed generated rows, episodes and scripted models.",
        rich_help_panel=TASKS,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="T",
        callback=check_finite,
        help="Set the model's sampling temperature.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="P",
        callback=check_finite,
        help="Set the probability mass of nucleus sampling.",
        rich_help_panel=SAMPLING,
    ),
]
MaxOutputTokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Limit each response of the model to N tokens.", rich_help_panel=SAMPLING),
]
Param = Annotated[
    list[str],
    typer.Option(
        "--param",
        metavar="KEY=JSON",
        help="Set another request parameter.",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
Turns = Annotated[
    int, typer.Option(min=1, metavar="N", help="Limit an episode to N model calls.", rich_help_panel=LIMITS)
]
ToolCalls = Annotated[
    int, typer.Option(min=0, metavar="N", help="Limit an episode to N tool calls.", rich_help_panel=LIMITS)
]
Deadline = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        callback=check_finite,
        help="Limit the duration of an episode.",
        rich_help_panel=LIMITS,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.001,
        metavar="SECONDS",
        callback=check_finite,
        help="Limit the duration of a model call.",
        rich_help_panel=LIMITS,
    ),
]
Attempts = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Try an episode that fails up to N times.", rich_help_panel=LIMITS),
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Skip invalid rows of the file.", rich_help_panel=TASKS)
]
Trajectories = Annotated[
    bool,
    typer.Option(
        "--trajectories",
        help="Add NeMo Gym's `ng_trajectory` to each line of rollouts.jsonl.",
        rich_help_panel=OUTPUT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write the run to this folder. By default, to a new one in ./rollouts.",
        rich_help_panel=OUTPUT,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.", rich_help_panel=OUTPUT)]
Force = Annotated[
    bool,
    typer.Option("--force", help="With --resume, continue although code has changed.", rich_help_panel=OUTPUT),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", rich_help_panel=OUTPUT)]


def parse_settings(names: Sequence[str], pairs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse the values of `--set`, which are `KEY=VALUE` or, with several environments, `NAME.KEY=VALUE`.

    Args:
        names: The environments.
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
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--pin {format_name(key)}: write it as KEY=VALUE, as in --pin temperature=1.0")
    if key in RESERVED_REQUEST_KEYS:
        raise UsageError(f"--pin {format_name(key)}: every request sets {key!r} itself; leave it out")
    try:
        return key, _parse_json(value)
    except ValueError:
        return key, value


def join_base_urls(urls: Sequence[str]) -> str | None:
    """Join the addresses of a model's replicas with commas, or return `None` if there are none."""
    return ",".join(urls) or None


def parse_sampling(
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    max_output_tokens: int | None = None,
    params: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the sampling parameters that override the parameters of each row.

    Args:
        temperature: The value of `--temperature`.
        top_p: The value of `--top-p`.
        max_output_tokens: The value of `--max-output-tokens`.
        params: The `KEY=JSON` pairs of `--param`.

    Raises:
        UsageError: A pair is malformed, or its key is reserved.
    """
    named = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    sampling: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    return sampling | dict(map(_parse_param, params))


def _parse_param(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--param {format_name(key)}: write it as KEY=JSON, as in --param seed=7")
    if key in RESERVED_REQUEST_KEYS:
        raise UsageError(f"--param {format_name(key)}: the host sets {key!r} itself; leave it out")
    try:
        return key, _parse_json(value)
    except ValueError:
        name = format_name(key)
        raise UsageError(
            f"--param {name}: the value is not valid JSON; put text in quotes, as in {name}='\"TEXT\"'"
        ) from None
