"""`gym`, the command of NeMo Gym 0.7: its subcommands run the commands of gymsdk.

An option such as `--num-repeats 4` means the same as the setting `+num_repeats=4`, which each command accepts too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gymsdk import __version__
from gymsdk.config import Deployment, load_config
from gymsdk.deploy import programs
from gymsdk.errors import UsageError
from gymsdk_nemo_compat.collect import collect
from gymsdk_nemo_compat.commands import report_errors, run_gymsdk, show_status
from gymsdk_nemo_compat.running import ServerRun

CONFIG_PATHS = "+config_paths="

ELSEWHERE = {
    "env": {
        "packages": "pip list; an environment is an installed package",
        "prefetch": "pip install gym-env-NAME; gymsdk has no environments for single servers",
        "publish": "python -m build, then upload the wheel to your package index",
        "schema": "gymsdk info NAME --json, which lists the fields of the tasks",
    },
    "eval": {
        "aggregate": "gymsdk rollout --resume; one run folder holds all rollouts",
        "compare": "gymsdk rollout for each model; each run folder has a metrics.json",
        "health-check": "gymsdk rollout, which writes failures with their reasons to failures.jsonl",
        "prepare": "gymsdk tasks NAME --output FILE",
        "profile": "gymsdk profile NAME",
        "reverify": "gymsdk reverify FOLDER",
    },
    "dataset": {
        "collate": "gymsdk tasks --check FILE, which checks the rows of a file",
        "download": "pip install gym-env-NAME; an environment brings its tasks",
        "render": "gymsdk tasks NAME --output FILE",
    },
}
"""Subcommands of NeMo Gym with another name or form in gymsdk, and what to use instead."""

app = typer.Typer(
    name="gym",
    help="NeMo Gym's command, on top of gymsdk.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
env_app = typer.Typer(help="Start, show and check servers.", no_args_is_help=True, rich_markup_mode=None)
eval_app = typer.Typer(help="Collect rollouts.", no_args_is_help=True, rich_markup_mode=None)
dataset_app = typer.Typer(help="Prepare task rows.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(env_app, name="env")
app.add_typer(eval_app, name="eval")
app.add_typer(dataset_app, name="dataset")

Overrides: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[+KEY=VALUE]...", help="Further settings.", show_default=False)
]
Configs: TypeAlias = Annotated[
    list[str] | None, typer.Option("--config", metavar="FILE", help="Read this configuration file; repeatable.")
]
Environments: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--environment", metavar="NAME", help="Serve this installed environment; repeatable."),
]
ResourcesServers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--resources-server", metavar="NAME[/FILE]", help="Serve this resources server; repeatable."),
]
Benchmarks: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--benchmark", metavar="NAME", help="Read benchmarks/NAME/config.yaml; repeatable."),
]
ModelType: TypeAlias = Annotated[
    str | None, typer.Option("--model-type", metavar="NAME[/FILE]", help="Serve a model of this type: vllm_model, …")
]
AgentType: TypeAlias = Annotated[
    str | None, typer.Option("--agent-type", metavar="NAME[/FILE]", help="Serve an agent of this type.")
]
Model: TypeAlias = Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", help="The model's name.")]
ModelUrl: TypeAlias = Annotated[
    str | None, typer.Option("--model-url", metavar="URL", help="The base URL of the model server.")
]
ModelKey: TypeAlias = Annotated[
    str | None, typer.Option("--model-api-key", metavar="KEY", help="The key of the model server.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """Run the command; exit with code 2 if its arguments are wrong, and with 1 if it fails."""
    with report_errors():
        app()


@app.callback(invoke_without_command=True)
def print_version(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Print the version of gymsdk for `gym --version`."""
    if version:
        typer.echo(f"gymsdk {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise UsageError("name a subcommand; gym --help lists them")


@app.command("list")
def list_components(
    kind: Annotated[str, typer.Argument(metavar="[environments]")] = "environments", json: Json = False
) -> None:
    """List the installed environments: gymsdk list."""
    if kind not in {"environments", "resources-servers"}:
        raise UsageError(f"gym list {kind} has no equivalent in gymsdk; gym list environments lists all environments")
    run_gymsdk("list", ["--json"] if json else [])


@env_app.command("start")
def start(  # noqa: PLR0913, PLR0917  # each is an option of the command
    overrides: Overrides = None,
    config: Configs = None,
    environment: Environments = None,
    resources_server: ResourcesServers = None,
    benchmark: Benchmarks = None,
    model_type: ModelType = None,
    agent_type: AgentType = None,
    model: Model = None,
    model_url: ModelUrl = None,
    model_api_key: ModelKey = None,
) -> None:
    """Start the servers: gymsdk serve."""
    arguments = build_arguments(
        list_files(config, environment, resources_server, benchmark, model_type, agent_type),
        {"policy_model_name": model, "policy_base_url": model_url, "policy_api_key": model_api_key},
        overrides or (),
    )
    if not arguments:
        raise UsageError("name what to serve, as in gym env start --environment NAME --model-type vllm_model")
    run_gymsdk("serve", arguments)


@env_app.command("status")
def print_status(overrides: Overrides = None, json: Json = False) -> None:
    """Print the status of the servers: gymsdk status."""
    show_status([*(overrides or ()), *(["+json=true"] if json else [])])


@env_app.command("resolve")
def resolve(overrides: Overrides = None, config: Configs = None) -> None:
    """Print the final configuration: gymsdk config."""
    run_gymsdk("config", build_arguments(config or (), {}, overrides or ()))


@env_app.command("validate")
def validate(
    overrides: Overrides = None,
    config: Configs = None,
    environment: Environments = None,
    resources_server: ResourcesServers = None,
    benchmark: Benchmarks = None,
    model_type: ModelType = None,
    agent_type: AgentType = None,
) -> None:
    """Check a configuration without starting servers."""
    files = list_files(config, environment, resources_server, benchmark, model_type, agent_type)
    deployment = _load(build_arguments(files, {}, overrides or ()))
    typer.echo(f"valid: {', '.join(server.name for server in deployment.servers)}")


@env_app.command("init")
def init(
    resources_server: Annotated[str | None, typer.Option("--resources-server", metavar="NAME")] = None,
    environment: Annotated[str | None, typer.Option("--environment", metavar="NAME")] = None,
) -> None:
    """Create an environment package from a template: gymsdk new."""
    name = environment or resources_server
    if name is None:
        raise UsageError("name the environment, as in gym env init --environment NAME")
    run_gymsdk("new", [name])


@env_app.command("test")
def test(
    resources_server: Annotated[str, typer.Option("--resources-server", metavar="NAME", help="The environment.")],
) -> None:
    """Find problems in an environment: gymsdk check."""
    run_gymsdk("check", [resources_server])


@eval_app.command("run")
def run(  # noqa: PLR0913, PLR0917  # each is an option of the command
    overrides: Overrides = None,
    config: Configs = None,
    environment: Environments = None,
    resources_server: ResourcesServers = None,
    benchmark: Benchmarks = None,
    model_type: ModelType = None,
    agent_type: AgentType = None,
    model: Model = None,
    model_url: ModelUrl = None,
    model_api_key: ModelKey = None,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Use servers that are running already.")] = False,
    agent: Annotated[
        str | None, typer.Option("--agent", "-a", metavar="NAME", help="Play rows that name no agent with this one.")
    ] = None,
    input: Annotated[
        str | None, typer.Option("--input", "-i", metavar="FILE", help="The JSONL file of the task rows.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="The JSONL file for the rollouts.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Play the first N rows only.")] = None,
    num_repeats: Annotated[int | None, typer.Option(metavar="K", help="Play each row K times.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="C", help="Play up to C rows at the same time.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="The sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Top-p of nucleus sampling.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(metavar="N", help="Limit each model call.")] = None,
    prompt_config: Annotated[str | None, typer.Option(hidden=True)] = None,
    split: Annotated[str | None, typer.Option(hidden=True)] = None,
    disable_aggregation: Annotated[bool, typer.Option("--disable-aggregation", hidden=True)] = False,
    interleave_repeats: Annotated[bool, typer.Option("--interleave-repeats", hidden=True)] = False,
    no_health_check: Annotated[bool, typer.Option("--no-health-check", hidden=True)] = False,
) -> None:
    """Start servers, collect rollouts and stop the servers; with `--no-serve`, use running servers."""
    files = list_files(config, environment, resources_server, benchmark, model_type, agent_type)
    if no_serve and files:
        raise UsageError(
            f"--no-serve uses servers that are running; leave out {', '.join(files)}, or leave out --no-serve"
        )
    settings = {
        "policy_model_name": model,
        "policy_base_url": model_url,
        "policy_api_key": model_api_key,
        "agent_name": agent,
        "input_jsonl_fpath": input,
        "output_jsonl_fpath": output,
        "limit": limit,
        "num_repeats": num_repeats,
        "num_samples_in_parallel": concurrency,
        "resume_from_cache": resume or None,
        "responses_create_params.temperature": temperature,
        "responses_create_params.top_p": top_p,
        "responses_create_params.max_output_tokens": max_output_tokens,
        "prompt_config": prompt_config,
        "split": split,
        "disable_aggregation": disable_aggregation or None,
        "interleave_repeats": interleave_repeats or None,
        "disable_health_check": no_health_check or None,
    }
    arguments = build_arguments(files, settings, overrides or ())
    if no_serve:
        collect(arguments)
    else:
        collect(arguments, serve=lambda rest: ServerRun.start(_load(rest)))


def build_arguments(
    files: Iterable[str], settings: Mapping[str, str | float | None], overrides: Sequence[str]
) -> list[str]:
    """Return the settings of a command in the form `+key=value`.

    Args:
        files: The configuration files; those of `+config_paths=[…]` in *overrides* follow them.
        settings: The values of the options by key; `None` for options that are not given.
        overrides: Settings in this form already, which take precedence.
    """
    paths = [*files]
    others = []
    for override in overrides:
        if override.startswith(f"{CONFIG_PATHS}["):
            paths += filter(None, override.removeprefix(f"{CONFIG_PATHS}[").removesuffix("]").split(","))
        else:
            others.append(override)
    given = [f"+{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]
    return [*([f"{CONFIG_PATHS}[{','.join(paths)}]"] if paths else []), *given, *others]


def list_files(
    configs: Sequence[str] | None,
    environments: Sequence[str] | None,
    resources_servers: Sequence[str] | None,
    benchmarks: Sequence[str] | None,
    model_type: str | None,
    agent_type: str | None,
) -> list[str]:
    """Return the configuration files that the options of a command name."""
    folders = (
        ("responses_api_models", [model_type] if model_type else ()),
        ("responses_api_agents", [agent_type] if agent_type else ()),
        ("resources_servers", resources_servers or ()),
    )
    named = [_get_config_file(folder, name) for folder, names in folders for name in names]
    named += [f"benchmarks/{name}/config.yaml" for name in benchmarks or ()]
    for name in environments or ():
        file = Path("environments", name, "config.yaml")
        named.append(str(file) if file.is_file() else _get_config_file("resources_servers", name))
    return [*(configs or ()), *named]


def _get_config_file(folder: str, name: str) -> str:
    """Return the path of a server's configuration, as in `vllm_model` or `vllm_model/vllm_model_for_training`."""
    server, _, file = name.partition("/")
    return f"{folder}/{server}/configs/{file or server}.yaml"


def _load(arguments: Sequence[str]) -> Deployment:
    deployment = load_config([], arguments)
    programs.check_deployment(deployment)
    if not deployment.servers:
        raise UsageError("the configuration names no server; add --config FILE or --environment NAME")
    return deployment


def _add_hint(group: str, name: str, instead: str) -> None:
    """Add a subcommand that says what to use instead of it, whatever its arguments are."""

    def explain() -> None:
        raise UsageError(f"gym {group} {name} is not available; use {instead}")

    apps = {"env": env_app, "eval": eval_app, "dataset": dataset_app}
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    apps[group].command(name, help=f"Not available; use {instead}.", context_settings=settings)(explain)


for _group, _commands in ELSEWHERE.items():
    for _name, _instead in _commands.items():
        _add_hint(_group, _name, _instead)
