"""What several commands take: settings, sampling parameters, models, read from the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import BadParameter
from typer.core import TyperGroup

from gymsdk import credentials, jsonl, responses
from gymsdk.errors import BadConfig, UsageError, format_suggestion

RESERVED_REQUEST_KEYS = frozenset({"input", "messages", "stream", "tools"})
"""Request parameters that are the host's own."""


def check_finite(value: float | None) -> float | None:
    """Give *value* where it is a finite number; what an option's callback raises where it is none."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def parse_head_url(value: str | None) -> str | None:
    """Give the URL of a head; raises `UsageError` where it is none, or says who asks."""
    return None if value is None else credentials.check_head_url(value)


def _check_seed(value: int) -> int:
    if value.bit_length() > 63:  # noqa: PLR2004  # what a JSON reader holds exactly
        raise typer.BadParameter("a seed has at most 63 bits")
    return value


Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the environment (NAME.KEY=VALUE with several).",
        show_default=False,
    ),
]
ModelName = Annotated[
    str,
    typer.Option(metavar="PROVIDER/NAME", help="Who plays: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME."),
]
OptionalModelName = Annotated[
    str | None,
    typer.Option(
        metavar="PROVIDER/NAME",
        help="Who plays: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME.",
        show_default="scripted/oracle",
    ),
]
Names = Annotated[list[str], typer.Argument(metavar="NAME", help="One or more environments.", show_default=False)]
OptionalNames = Annotated[
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
        metavar="URL",
        callback=parse_head_url,
        help="The head of running servers that do it, as in http://127.0.0.1:11000.",
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
Api = Annotated[responses.Api | None, typer.Option(help="What the model server speaks.")]
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
OptionalRepeats = Annotated[
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
DatasetName = Annotated[
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
    typer.Option(metavar="S", callback=_check_seed, help="Decides generated rows, episodes and scripted answers."),
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, metavar="T", callback=check_finite, help="The model's sampling temperature.")
]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, metavar="P", callback=check_finite, help="The model's nucleus, from 0 to 1."),
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
    float, typer.Option(min=0.001, metavar="SECONDS", callback=check_finite, help="How long an episode may take.")
]
Timeout = Annotated[
    float, typer.Option(min=0.001, metavar="SECONDS", callback=check_finite, help="How long a model call may take.")
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


def parse_settings(names: Sequence[str], pairs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give each environment's settings out of `KEY=VALUE` or `NAME.KEY=VALUE`; raises `UsageError`."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pair in pairs:
        path, equals, value = pair.partition("=")
        name = next((name for name in names if path.startswith(f"{name}.")), names[0] if len(given) == 1 else None)
        if name is None or not equals or not path:
            wanted = "KEY=VALUE" if len(given) == 1 else f"NAME.KEY=VALUE with NAME one of {', '.join(given)}"
            raise UsageError(f"--set {pair}: write it as {wanted}")
        given[name][path.removeprefix(f"{name}.")] = _parse_value(pair, value)
    return given


def _parse_value(pair: str, text: str) -> Any:
    """Give lists, objects and null as JSON says them; pydantic reads numbers and truth values out of text."""
    if text[:1] in {"[", "{"} or text == "null":
        try:
            return jsonl.parse_json(text, strict=True)
        except ValueError as error:
            raise UsageError(f"--set {pair}: the value is no JSON ({error}); mend its brackets and quotes") from None
    return text


def parse_pins(pairs: Iterable[str]) -> dict[str, Any]:
    """Give what `KEY=VALUE` pins, a value read as JSON or else as text; raises `UsageError`."""
    return dict(map(_parse_pin, pairs))


def _parse_pin(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--pin {pair}: write it as KEY=VALUE, as in --pin temperature=1.0")
    if key in RESERVED_REQUEST_KEYS:
        raise UsageError(f"--pin {pair}: {key!r} is the caller's to say; leave it out")
    try:
        return key, jsonl.parse_json(value, strict=True)
    except ValueError:
        return key, value


def join_base_urls(given: Sequence[str]) -> str | None:
    """Give the addresses of a model's replicas as one text, `None` where there are none."""
    return ",".join(given) or None


def parse_sampling(
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    max_output_tokens: int | None = None,
    params: Iterable[str] = (),
) -> dict[str, Any]:
    """Give the sampling parameters that go over each row's own; raises `UsageError`."""
    plain = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    given: dict[str, Any] = {key: value for key, value in plain.items() if value is not None}
    return given | dict(map(_parse_param, params))


def _parse_param(pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--param {pair}: write it as KEY=JSON, as in --param seed=7")
    if key in RESERVED_REQUEST_KEYS:
        raise UsageError(f"--param {pair}: {key!r} is the host's to fill; leave it out")
    try:
        return key, jsonl.parse_json(value, strict=True)
    except ValueError:
        quoted = f"{key}='\"{value}\"'"
        raise UsageError(f"--param {pair}: the value is no JSON; a text needs quotes, as in {quoted}") from None


if TYPE_CHECKING:
    from gymsdk.config.model import DatasetConfig, ModelServerConfig, ServerConfig
    from gymsdk.types import Model


@dataclass(frozen=True, slots=True)
class ChosenDataset:
    """The rows at *path*, each played *repeats* times by *agent*: with *settings* of *environment*, and a *player*.

    *models* has the model servers that settings of the environment name. There is no *player* where the configuration
    names none.
    """

    path: Path
    repeats: int
    agent: str
    environment: str
    settings: Mapping[str, Any] = field(repr=False)
    models: Mapping[str, str]
    player: ModelServerConfig | None

    def build_model(self) -> Model | None:
        """Give the model that plays as the configuration says, `None` where it does not."""
        from gymsdk.models import registry as models

        return models.model(self.player.name, **self.player.options) if self.player else None

    def check_models(self) -> None:
        """Refuse to play here without a model server that the environment asks; raises `UsageError`."""
        for setting, server in self.models.items():
            raise UsageError(
                f"{self.environment} asks the model server {server!r} as its {setting}, and no server runs here; start "
                "them with `gymsdk serve --config FILE` and add --head URL, or name the model itself in the "
                f"configuration, as in {setting}: PROVIDER/NAME"
            )

    def describe_model(self) -> dict[str, Any]:
        """Give what a plan has to say of that model."""
        if self.player is None:
            return {}
        its = self.player.options
        return {
            "model": self.player.name,
            "base_url": ",".join(its.get("base_url", ())) or None,
            "api": its.get("api"),
            "pinned": dict(its.get("pinned", {})),
            "tokens": bool(its.get("tokens", False)),
        }


def select_dataset(
    files: Sequence[Path], name: str | None, others: Mapping[str, object], *, played: bool = False
) -> ChosenDataset:
    """Give the dataset that a command asks for; *others* of its words say otherwise whose rows are meant.

    Where it is *played* by a model that the command names, the files need name none.
    """
    if name is None:
        raise UsageError("--config has the datasets of a configuration; name one with --dataset")
    if not files:
        raise UsageError(f"--dataset {name}: name the configuration that has it with --config")
    if taken := next((option for option, value in others.items() if value is not None), None):
        raise UsageError(f"--dataset {name} says which rows are meant, and whose they are; leave out {taken}")
    return find_dataset(files, name, played=played)


def find_dataset(files: Sequence[Path], name: str, *, played: bool = False) -> ChosenDataset:
    """Give the dataset *name*, or `SERVER.NAME`, that *files* have; raises `UsageError`."""
    from gymsdk import config
    from gymsdk.deploy import plan

    deployment = config.load_config(files, played=played)
    for note in deployment.notes:
        typer.echo(note, err=True)
    blocks = {each.name: each for each in plan.whole(deployment)}
    block, dataset = _find_blocks(blocks.values(), name, files)
    if not dataset.path.is_file():
        raise BadConfig(
            f"{dataset.place}: dataset {name!r} is to be in {dataset.path}, and there is no such file;"
            " mend jsonl_fpath, or put the file there"
        )
    agent = _find_agent(block, blocks)
    resources = blocks.get(agent.refers.get(plan.RESOURCES_REF, ""))
    if resources is None:
        raise BadConfig(f"{agent.place}: {agent.name} names no resources_server, whose environment is to be played")
    return ChosenDataset(
        path=dataset.path,
        repeats=dataset.repeats,
        agent=agent.name,
        environment=getattr(resources.part, "environment", resources.implementation),
        settings=resources.settings,
        models=resources.models,
        player=_find_model_server(agent, blocks),
    )


def _find_blocks(
    blocks: Iterable[ServerConfig], name: str, files: Sequence[Path]
) -> tuple[ServerConfig, DatasetConfig]:
    known = [(block, each) for block in blocks for each in block.datasets]
    found = [each for each in known if name in {each[1].name, _qualify_name(*each)}]
    if len(found) == 1:
        return found[0]
    if found:
        several = " and ".join(_qualify_name(*each) for each in found)
        raise UsageError(f"--dataset {name}: there are {several}; write one of them so")
    called = [each.name for _, each in known]
    names = [each.name if called.count(each.name) == 1 else _qualify_name(block, each) for block, each in known]
    told = ", ".join(map(str, files)) or "the configuration"
    near = (
        format_suggestion(name, names, f"there are {', '.join(names)}")
        if names
        else "; a server lists its in `datasets`"
    )
    raise UsageError(f"--dataset {name}: {told} has no such dataset{near}")


def _qualify_name(block: ServerConfig, dataset: DatasetConfig) -> str:
    """Give what *dataset* is called where others have its name."""
    return f"{block.name}.{dataset.name}"


def _find_agent(block: ServerConfig, blocks: Mapping[str, ServerConfig]) -> ServerConfig:
    """Give the agent that plays the rows of *block*: itself, or the one that refers to it."""
    from gymsdk.deploy.plan import AGENT_REF, RESOURCES_REF

    if block.kind == "environment_servers":
        return blocks[block.refers[AGENT_REF]]
    if block.kind == "resources_servers":
        agents = (each for each in blocks.values() if each.kind == "responses_api_agents")
        return next(each for each in agents if each.refers.get(RESOURCES_REF) == block.name)
    return block


def _find_model_server(agent: ServerConfig, blocks: Mapping[str, ServerConfig]) -> ModelServerConfig | None:
    from gymsdk.config.model import ModelServerConfig
    from gymsdk.deploy.plan import MODEL_REF

    model = blocks.get(agent.refers.get(MODEL_REF, ""))
    return model.part if model is not None and isinstance(model.part, ModelServerConfig) else None


CHOICE_ERROR = re.compile(r"(?P<given>'[^']*') is not one of (?P<known>.*?)\.?", re.DOTALL)


class CommandGroup(TyperGroup):
    """The commands; a wrong value of theirs is told with the nearest right one."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            error.message = rewrite_usage_error(error.message)
            raise


def rewrite_usage_error(message: str) -> str:
    """Give *message* without the reader's own terms, and with the nearest of what could have been chosen."""
    told = message.removeprefix("Value error, ")
    found = CHOICE_ERROR.fullmatch(told)
    if found is None:
        return told
    near = format_suggestion(found["given"].strip("'"), re.findall(r"'([^']*)'", found["known"]))
    return f"{found['given']} is not one of {found['known']}{near}" if near else told
