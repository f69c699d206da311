"""`gymsdk config`: show a deployment's settings with their origins, or write a configuration file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from gymsdk.cli import options
from gymsdk.cli.output import echo, print_json
from gymsdk.errors import UnknownEnvironment, UsageError, format_name, is_public
from gymsdk.settings import OUTPUT
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from gymsdk.config.model import Deployment


def config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | KEY=VALUE...]",
            help="Name an environment to write a file for, or settings that override the files.",
            show_default=False,
        ),
    ] = None,
    *,
    files: options.Configs = [],  # noqa: B006  # typer copies it
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file instead of standard output.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show settings with their origins, or write a configuration.

    With the name of an environment, the command writes a file that serves this environment.

    Examples:
        gymsdk config math --output math.yaml
        gymsdk config --config math.yaml policy_model_name=Qwen/Qwen3-4B
    """
    parsed = list(words or [])
    names = [word for word in parsed if "=" not in word and not word.startswith(("+", "~"))]
    if not names:
        _show_settings(files, parsed, output, json=json)
        return
    _check_name_is_alone(names, [word for word in parsed if word not in names], files)
    _write_starter_file(names[0], output)


def _check_name_is_alone(names: list[str], overrides: list[str], files: list[str]) -> None:
    """Raise `UsageError` if an environment's name comes with settings or files."""
    from gymsdk import config as configuration
    from gymsdk.deploy import plan

    plan.check_names(names)
    if overrides:
        # Validate the settings first: a mistyped setting gets its own error message.
        configuration.load_config(files, overrides, environments=names)
    if len(names) > 1:
        raise UsageError(
            f"a file serves one environment, and settings are KEY=VALUE; {' '.join(map(format_name, names))} is neither"
        )
    if overrides or files:
        other = format_name(overrides[0].partition("=")[0]) if overrides else f"--config {files[0]}"
        raise UsageError(
            f"{names[0]!r} names an environment to write a file for and must stand alone; leave out {other}, "
            f"or leave out {names[0]} to show the settings"
        )


def _show_settings(files: list[str], overrides: list[str], output: Path | None, *, json: bool) -> None:
    from gymsdk import config as configuration
    from gymsdk.deploy import programs

    if output is not None:
        raise UsageError(f"--output {output} needs the environment to write a file for, as in gymsdk config math")
    deployment = configuration.load_config(files, overrides)
    _print_deployment(deployment, json=json)
    # Validate after printing, so that people see the settings even if they are invalid.
    programs.check_deployment(deployment)


def _print_deployment(deployment: Deployment, *, json: bool) -> None:
    from gymsdk.config import show

    deployment = show.redact_fields(deployment, _find_secret_settings(deployment))
    if json:
        print_json(show.dump_settings(deployment))
        return
    echo("\n".join(show.format_yaml_lines(deployment)))
    for line in filter(None, (deployment.ignored_keys_note, *deployment.notes)):
        typer.echo(line, err=True)


def _find_secret_settings(deployment: Deployment) -> dict[str, set[str]]:
    """Return the names of secret settings by server, for the environments that are installed.

    A wrong setting counts as secret unless it holds only numbers and words, because a user may have written a secret
    in its place.
    """
    from gymsdk.config.model import ResourcesServerConfig
    from gymsdk.deploy import plan

    wrong = plan.find_wrong_settings(deployment)
    secrets: dict[str, set[str]] = {}
    for server in deployment.servers:
        if isinstance(server.kind_settings, ResourcesServerConfig):
            fields = _read_config_fields(server.kind_settings.environment)
            nested = {name for name, field in fields.items() if _has_secret_field(field.annotation)}
            doubtful = nested | {key for key, value in server.settings.items() if not is_public(value)}
            named = {name for name, field in fields.items() if "Secret" in str(field.annotation)}
            secrets[server.name] = named | (wrong[server.name] & doubtful)
    return secrets


def _has_secret_field(annotation: object, *parents: object) -> bool:
    """Return whether a value of this type may have a secret, directly or in a model or list below it."""
    if annotation in parents:
        return False
    fields = getattr(annotation, "model_fields", {}).values()
    parts = (*get_args(annotation), *(field.annotation for field in fields))
    return "Secret" in str(annotation) or any(_has_secret_field(part, annotation, *parents) for part in parts)


def _read_config_fields(name: str) -> dict[str, FieldInfo]:
    """Return the settings of an environment; empty if it is not installed."""
    from gymsdk.plugins import registry

    try:
        return registry.load_config_type(name).model_fields
    except UnknownEnvironment:
        return {}


def _write_starter_file(name: str, output: Path | None) -> None:
    from gymsdk.cli.info import describe_fields
    from gymsdk.config import show
    from gymsdk.plugins import registry

    fields = describe_fields(type(registry.load(name).config))
    text = show.build_starter_file(name, {field["name"]: field["default"] for field in fields})
    if output is None:
        echo(text, nl=False)
        return
    try:
        # Another process may create the file after a check that there is none.
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{shorten_path(output)} already exists; choose another --output") from None
    except OSError as error:
        raise UsageError(f"cannot write {shorten_path(output)}: {error.strerror}; choose another --output") from None
    shown = shorten_path(output)
    echo(f"Wrote {shown}: gymsdk serve --config {shown}")
