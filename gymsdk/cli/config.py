"""`gymsdk config`: the settings of a deployment and where each comes from, or a file to start with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.config.model import Deployment
    from gymsdk.environment import Environment

ConfigFiles = Annotated[
    list[Path],
    typer.Option("--config", metavar="FILE", help="A configuration; later ones win.", show_default=False),
]


def config(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | KEY=VALUE...]",
            help="An environment to write a file for, or settings that win over the files.",
            show_default=False,
        ),
    ] = None,
    *,
    files: ConfigFiles = [],  # noqa: B006  # typer copies it
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write; standard output, if none."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show settings and where each comes from, or write a file that serves an environment."""
    given = list(words or [])
    names = [word for word in given if "=" not in word and not word.startswith(("+", "~"))]
    if not names:
        _show_settings(files, given, output, json=json)
        return
    _check_name_is_alone(names, [word for word in given if word not in names], files)
    _write_starter_file(names[0], output)


def _check_name_is_alone(names: list[str], overrides: list[str], files: list[Path]) -> None:
    """Refuse whatever stands beside the name of an environment, what is wrong with that first; raises `UsageError`."""
    from gymsdk import config as configuration
    from gymsdk.deploy import validate

    validate.check_names(names)
    if overrides:
        # Who meant to show settings, and mistyped one, is told that.
        configuration.load_config(files, overrides)
    if len(names) > 1:
        raise UsageError(f"a file is for one environment, and a setting is KEY=VALUE; {' '.join(names)} is neither")
    if overrides or files:
        other = overrides[0] if overrides else f"--config {files[0]}"
        raise UsageError(
            f"{names[0]!r} would be an environment to write a file for, which goes alone; leave out {other}, "
            f"or leave out {names[0]} to see settings"
        )


def _show_settings(files: list[Path], given: list[str], output: Path | None, *, json: bool) -> None:
    from gymsdk import config as configuration
    from gymsdk.deploy import validate

    if output is not None:
        raise UsageError(f"--output {output} is for the file of an environment; name that, as in gymsdk config math")
    deployment = configuration.load_config(files, given)
    _print_deployment(deployment, json=json)
    # What was read can be seen all the same: it may be there that it was meant otherwise.
    validate.check(deployment)


def _print_deployment(deployment: Deployment, *, json: bool) -> None:
    from gymsdk.config import show

    deployment = show.redact_fields(deployment, _find_secret_settings(deployment))
    if json:
        from gymsdk import jsonl

        typer.echo(jsonl.dump_document(show.dump_settings(deployment)), nl=False)
        return
    typer.echo("\n".join(show.format_yaml_lines(deployment)))
    for line in filter(None, (deployment.ignored_keys_note, *deployment.notes)):
        typer.echo(line, err=True)


def _find_secret_settings(deployment: Deployment) -> dict[str, set[str]]:
    """Give which settings of environments those call secret, by their servers; of one that is not here, none."""
    from gymsdk.config.model import ResourcesServerConfig
    from gymsdk.errors import GymsdkError
    from gymsdk.plugins import registry

    found: dict[str, set[str]] = {}
    for block in deployment.servers:
        if not isinstance(block.part, ResourcesServerConfig):
            continue
        try:
            fields = type(registry.load(block.part.environment).config).model_fields
        except GymsdkError:
            continue
        found[block.name] = {name for name, field in fields.items() if "Secret" in str(field.annotation)}
    return found


def _write_starter_file(name: str, output: Path | None) -> None:
    from gymsdk.config import show
    from gymsdk.plugins import registry

    text = show.build_starter_file(name, _list_default_settings(registry.load(name)))
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} is there and is not replaced; choose another --output") from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    typer.echo(f"Wrote {output}: gymsdk serve --config {output}")


def _list_default_settings(environment: Environment) -> dict[str, Any]:
    """Give the environment's own settings with their defaults, `null` for those that must be given."""
    from pydantic_core import to_jsonable_python

    return {
        name: None
        if field.is_required()
        else to_jsonable_python(field.get_default(call_default_factory=True), fallback=repr)
        for name, field in type(environment.config).model_fields.items()
    }
