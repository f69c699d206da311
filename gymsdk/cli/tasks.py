"""`gymsdk tasks`: write an environment's rows to a file for trainers, or check such a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.cli.fields import Changed, Only, take_models
from gymsdk.cli.output import echo, get_output, print_json
from gymsdk.errors import (
    BadConfig,
    BrokenEnvironment,
    GymsdkError,
    UnknownEnvironment,
    UsageError,
    format_name,
    format_suggestion,
)
from gymsdk.rollouts.settings import Rows, RunOutput
from gymsdk.settings import TASKS
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gymsdk.config.model import DatasetConfig, ModelServerConfig, ServerConfig
    from gymsdk.environment import Environment
    from gymsdk.rollouts.tasks import FileCheck
    from gymsdk.types import Model, Row


@dataclass(frozen=True, slots=True)
class ChosenDataset:
    """A dataset of a configuration.

    Attributes:
        path: The JSONL file of rows.
        repeats: How often each row is played.
        agent: The name of the agent that plays the rows.
        environment: The name of the environment.
        settings: The settings of the environment.
        models: The model servers that settings of the environment name, by setting.
        policy_model: The model server of the agent, or `None` if the configuration names none.
    """

    path: Path
    repeats: int
    agent: str
    environment: str
    settings: Mapping[str, Any] = field(repr=False)
    models: Mapping[str, str]
    policy_model: ModelServerConfig | None

    def build_model(self) -> Model | None:
        """Build the model that the configuration names, or return `None`."""
        from gymsdk.models import registry as models

        return models.model(self.policy_model.name, **self.policy_model.options) if self.policy_model else None

    def check_models(self) -> None:
        """Raise `UsageError` if the environment calls a model server, because no server runs in this process."""
        for setting, server in self.models.items():
            raise UsageError(
                f"{self.environment} calls the model server {server!r} as its {setting}, and no server runs here; "
                "start the servers with `gymsdk serve --config FILE` and pass --head URL, or name the model itself in "
                f"the configuration, as in {setting}: PROVIDER/NAME"
            )

    def describe_model(self) -> dict[str, Any]:
        """Return the fields of a run's plan that describe the model."""
        if self.policy_model is None:
            return {}
        model_options = self.policy_model.options
        # Not the key and the headers: the description is written to the folder of the run.
        described = ("base_url", "api", "pinned", "tokens")
        return {
            "model": self.policy_model.name,
            "model_options": {key: model_options[key] for key in described if key in model_options},
        }


def select_dataset(
    files: Sequence[str], name: str | None, others: Mapping[str, object], *, played: bool = False
) -> ChosenDataset:
    """Return the dataset that the options of a command name.

    Args:
        others: Options that choose rows in another way, by option.
        played: Whether the command names the model, so that the configuration may omit it.

    Raises:
        UsageError: No dataset is named, or an option contradicts it.
    """
    if name is None:
        raise UsageError("--config requires the name of one of its datasets; pass it with --dataset")
    if not files:
        raise UsageError(f"--dataset {name}: pass the configuration that defines it with --config")
    if conflict := next((option for option, value in others.items() if value is not None), None):
        raise UsageError(f"--dataset {name} defines the rows and their environment; leave out {conflict}")
    return find_dataset(files, name, played=played)


def find_dataset(files: Sequence[str], name: str, *, played: bool = False) -> ChosenDataset:
    """Return the dataset *name*, or `SERVER.NAME`, of the configuration *files*. Raises `UsageError` without one."""
    from gymsdk import config
    from gymsdk.deploy import plan

    deployment = config.load_config(files, played=played)
    for note in deployment.notes:
        typer.echo(note, err=True)
    servers = {server.name: server for server in plan.complete_servers(deployment)}
    server, dataset = _find_named(servers.values(), name, files)
    if not dataset.path.is_file():
        raise BadConfig(
            f"{dataset.place}: the file {shorten_path(dataset.path)} of dataset {name!r} does not exist;"
            " correct jsonl_fpath, or create the file"
        )
    agent = _find_agent(server, servers)
    resources = servers.get(agent.refers.get(plan.RESOURCES_REF, ""))
    if resources is None:
        raise BadConfig(
            f"{agent.place}: {agent.name} has no resources_server; name the server whose environment it plays"
        )
    return ChosenDataset(
        path=dataset.path,
        repeats=dataset.repeats,
        agent=agent.name,
        environment=getattr(resources.kind_settings, "environment", resources.implementation),
        settings=resources.settings,
        models=resources.models,
        policy_model=_find_model_server(agent, servers),
    )


def _find_named(servers: Iterable[ServerConfig], name: str, files: Sequence[str]) -> tuple[ServerConfig, DatasetConfig]:
    all_datasets = [(server, dataset) for server in servers for dataset in server.datasets]
    matches = [match for match in all_datasets if name in {match[1].name, _qualify_name(*match)}]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = " and ".join(_qualify_name(*match) for match in matches)
        raise UsageError(f"--dataset {name}: several datasets have this name; write one of {several}")
    called = [dataset.name for _, dataset in all_datasets]
    names = [
        dataset.name if called.count(dataset.name) == 1 else _qualify_name(server, dataset)
        for server, dataset in all_datasets
    ]
    file_names = ", ".join(files) or "the configuration"
    hint = (
        format_suggestion(name, names, f"its datasets are {', '.join(names)}")
        if names
        else "; a server lists its datasets under `datasets`"
    )
    raise UsageError(f"--dataset {name}: {file_names} does not define this dataset{hint}")


def _qualify_name(server: ServerConfig, dataset: DatasetConfig) -> str:
    """Return the name that distinguishes *dataset* from datasets of the same name."""
    return f"{server.name}.{dataset.name}"


def _find_agent(server: ServerConfig, servers: Mapping[str, ServerConfig]) -> ServerConfig:
    """Return the agent that plays the rows of *server*: *server* itself, or the agent that refers to it."""
    from gymsdk.deploy.plan import AGENT_REF, RESOURCES_REF

    if server.kind == "environment_servers":
        return servers[server.refers[AGENT_REF]]
    if server.kind == "resources_servers":
        agents = (agent for agent in servers.values() if agent.kind == "responses_api_agents")
        return next(agent for agent in agents if agent.refers.get(RESOURCES_REF) == server.name)
    return server


def _find_model_server(agent: ServerConfig, servers: Mapping[str, ServerConfig]) -> ModelServerConfig | None:
    from gymsdk.config.model import ModelServerConfig
    from gymsdk.deploy.plan import MODEL_REF

    model = servers.get(agent.refers.get(MODEL_REF, ""))
    return model.kind_settings if model is not None and isinstance(model.kind_settings, ModelServerConfig) else None


DEFAULT_ROWS = 100
"""How many rows of each environment are written if --limit is not given. A split may be infinite."""


@take_models
def tasks(
    names: options.OptionalNames = None,
    *,
    rows: Annotated[
        Rows,
        Only("split", "limit", "seed"),
        Changed(
            limit={"names": ("--limit", "-n"), "help": "Write N rows of each environment. By default, 100."},
        ),
    ],
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    out: Annotated[
        RunOutput,
        Only("output", "overwrite"),
        Changed(
            output={"metavar": "FILE", "help": "Write to this file instead of standard output."},
            overwrite={"help": "Replace the file."},
        ),
    ],
    validate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Check the rows of this file instead of writing rows.", rich_help_panel=TASKS
        ),
    ] = None,
    config: options.Configs = [],  # noqa: B006  # typer copies it
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Check the rows of this dataset of the configuration.", rich_help_panel=TASKS
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write task rows for trainers, or check a file of rows.

    Each row names the agent of its environment. The rows of several environments alternate.

    Examples:
        gymsdk tasks math --split train --limit 1000 --output math.jsonl
        gymsdk tasks --validate math.jsonl
    """
    environments = list(dict.fromkeys(names or []))
    if dataset is not None or config:
        _check_dataset(
            config, dataset, {"NAME": names or None, "--validate": validate, "--output": out.output}, json=json
        )
        return
    if validate is not None:
        _validate_file(validate, environments, settings, json=json)
        return
    if not environments:
        raise UsageError("Missing argument 'NAME': name the environments to write rows of; `gymsdk list` shows them")
    _write_rows(environments, settings, rows, out, json=json)


def _write_rows(names: list[str], settings: list[str], rows: Rows, to: RunOutput, *, json: bool) -> None:
    from gymsdk import jsonl
    from gymsdk.cli.process import run_in_new_loop
    from gymsdk.plugins import registry
    from gymsdk.rollouts.tasks import AtomicRowWriter, add_tools, interleave_splits

    parsed = options.parse_settings(names, settings)
    # Rows are UTF-8 whatever the encoding of the console.
    out = get_output().buffer
    loaded = {name: registry.load(name, **values) for name, values in parsed.items()}
    interleaved = interleave_splits(loaded, rows.split, seed=rows.seed, limit=rows.limit or DEFAULT_ROWS)
    rows_to_write = add_tools(loaded, interleaved, seed=rows.seed)
    if rows.limit is None:
        typer.echo(f"at most {DEFAULT_ROWS} rows of each environment; pass another number with -n N", err=True)
    if to.output is None:
        run_in_new_loop(_iter_rows(rows_to_write, lambda row: out.write(jsonl.dump_row(row))))
        out.flush()
        return
    with AtomicRowWriter(to.output, overwrite=to.overwrite) as sheet:
        run_in_new_loop(_iter_rows(rows_to_write, sheet.add))
    shown = shorten_path(to.output)
    summary = {"output": str(shown), "rows": sheet.count, "environments": names}
    echo(jsonl.dump_document(summary) if json else f"{sheet.count:,} rows in {shown}\n", nl=False)


async def _iter_rows(rows: AsyncIterator[Row], write: Callable[[Row], object]) -> None:
    async for row in rows:
        write(row)


def _validate_file(path: Path, names: list[str], settings: list[str], *, json: bool) -> None:
    from functools import cache

    from gymsdk.plugins import registry
    from gymsdk.rollouts.tasks import check_file

    if settings and not names:
        name = format_name(settings[0].partition("=")[0])
        raise UsageError(f"--set {name}: name the environment of the setting, as in `gymsdk tasks NAME --set …`")
    parsed = options.parse_settings(names, settings)

    @cache
    def environment_of(name: str) -> Environment | GymsdkError:
        try:
            return registry.load(name, **parsed.get(name, {}))
        except (UnknownEnvironment, BrokenEnvironment) as error:
            return error

    report = check_file(path, environment_of, default=names[0] if len(names) == 1 else None)
    _print_errors(path, report, json=json)


def _check_dataset(files: list[str], name: str | None, others: dict[str, object], *, json: bool) -> None:
    from gymsdk.plugins import registry
    from gymsdk.rollouts.tasks import check_file

    # No model is needed to check rows.
    chosen = select_dataset(files, name, others, played=True)
    environment = registry.load(chosen.environment, **chosen.settings)
    report = check_file(chosen.path, lambda _: environment, default=chosen.environment)
    _print_errors(chosen.path, report, json=json)


def _print_errors(path: Path, report: FileCheck, *, json: bool) -> None:
    """Print the report on the rows of the file *path*; the command fails if one is not valid."""
    if json:
        bad = [{"line": number, "reason": reason} for number, reason in report.bad]
        print_json(
            {
                "file": str(shorten_path(path)),
                "good": report.good.total(),
                "bad": bad,
                "environments": dict(report.good),
            }
        )
    else:
        for number, reason in report.bad:
            echo(f"{shorten_path(path)}:{number}: {reason}")
        by_name = "".join(f", {count:,} of {name}" for name, count in report.good.items())
        echo(f"{report.good.total():,} rows are valid{by_name}; {len(report.bad):,} are not")
    if report.bad:
        raise typer.Exit(1)
