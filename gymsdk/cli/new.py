"""`gymsdk new`: create an environment package from the template."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, Field

from gymsdk.cli import options
from gymsdk.cli.fields import take_models
from gymsdk.cli.output import echo, print_json
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.plugins.registry import canonicalize_name
from gymsdk.settings import OUTPUT, PACKAGE, Flag
from gymsdk.working_folder import shorten_path

DISTRIBUTION_PREFIX = "gym-env-"
"""Prefix of the distribution's name."""

NAME_PATTERN = r"(?!(?i:gym-env-))(?!.*-v[0-9]+\Z)[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?"
"""Valid names. The template checks the same pattern."""


@dataclass(frozen=True, slots=True)
class EnvironmentName:
    """The name of an environment, with the names of its distribution and its module."""

    name: str

    @property
    def distribution(self) -> str:
        """The name for pip, which is the name of the folder too."""
        return f"{DISTRIBUTION_PREFIX}{self.name}"

    @property
    def module(self) -> str:
        """The name for `import`. The prefix ensures that it is not a reserved word."""
        return re.sub(r"[-.]", "_", self.distribution).lower()


def parse_name(name: str) -> EnvironmentName:
    """Return *name* as an environment's name. Raises `UsageError` if it is invalid."""
    if re.fullmatch(NAME_PATTERN, name):
        return EnvironmentName(name)
    raise UsageError(_describe_name_error(name))


def _describe_name_error(name: str) -> str:
    shown_name = ascii(name if len(name) <= 80 else f"{name[:80]}…")  # noqa: PLR2004  # what fits a line
    if name.lower().startswith(DISTRIBUTION_PREFIX):
        rest = name[len(DISTRIBUTION_PREFIX) :] or "NAME"
        return f"the name {shown_name} is a distribution's; leave out `{DISTRIBUTION_PREFIX}`: `gymsdk new {rest}`"
    if re.fullmatch(r".*-v[0-9]+", name):
        return f"the name {shown_name} ends like a Gymnasium version; leave out `-v<digits>`, or write `_v<digits>`"
    return (
        f"{shown_name} is not a valid environment name; use 1 to 64 letters, digits, `-`, `_` and `.`,"
        " with a letter or digit at both ends, as in `gymsdk new my-env`"
    )


class Package(BaseModel):
    """The package that the command creates."""

    kind: Annotated[Literal["single-turn", "tools"], Flag(PACKAGE)] = Field(
        "single-turn", description="Create a task with a single reply, or with tools that share a state."
    )
    judge: Annotated[bool, Flag(PACKAGE, names=("--judge/--no-judge",))] = Field(
        False, description="Let another model judge if a setting names one."
    )
    author: Annotated[str | None, Flag(PACKAGE, "NAME", shown=False)] = Field(
        None, description="Name the author in the licence."
    )
    license: Annotated[Literal["Apache-2.0", "MIT", "proprietary"], Flag(PACKAGE)] = Field(
        "Apache-2.0", description="Choose the licence."
    )
    output: Annotated[Path, Flag(OUTPUT, "DIR", ("--output", "-o"))] = Field(
        Path(), description="Create the package's folder inside this folder."
    )


@take_models
def new(
    name: Annotated[str, typer.Argument(help="Name the environment, as in `gymsdk play NAME`.")],
    *,
    package: Package,
    json: options.Json = False,
) -> None:
    """Create an environment package from a template.

    You can install, test and play the package at once.
    Change its rows and its verifier; `gymsdk check NAME` reports their defects.

    Examples:
        gymsdk new my-env
        gymsdk new my-tools --kind tools --output ~/environments
    """
    environment_name = parse_name(name)
    folder = package.output / environment_name.distribution
    _check_available(environment_name, folder)
    context = {"name": name, **package.model_dump(include={"kind", "judge", "license"})}
    author = {} if package.author is None else {"author": _resolve_author(package.author)}
    _write_package({**context, **author}, package.output)
    if json:
        _print_json(environment_name, folder)
        return
    _print(environment_name, shorten_path(folder))


def _check_available(environment_name: EnvironmentName, folder: Path) -> None:
    from gymsdk.plugins import registry

    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{shorten_path(folder)} already exists; choose another name, or another folder with --output")
    names = {canonicalize_name(environment_name.name), canonicalize_name(environment_name.distribution)}
    for entry in registry.installed().values():
        if names & {canonicalize_name(entry.name), canonicalize_name(entry.distribution)}:
            home = f"{entry.distribution} {entry.version}"
            raise UsageError(f"an environment named {entry.name!r} is already installed ({home}); choose another name")


def _resolve_author(author: str) -> str:
    # cookiecutter renders values as templates, so braces are not allowed.
    if author.strip() and author.isprintable() and not {"{", "}"} & set(author):
        return author
    raise UsageError(f"--author {author!a}: write a name on one line without braces, as in 'Ada Lovelace'")


def _write_package(context: dict[str, Any], output: Path) -> None:
    from tempfile import TemporaryDirectory

    try:
        from cookiecutter.exceptions import CookiecutterException
        from cookiecutter.main import cookiecutter
    except ModuleNotFoundError as error:
        raise UsageError(f'gymsdk new needs cookiecutter; run: pip install "gymsdk[author]" ({error})') from None
    with TemporaryDirectory() as scratch:
        # Keep cookiecutter from reading its settings and writing its records in the home folder.
        cookiecutter_config: Any = {"replay_dir": scratch, "cookiecutters_dir": scratch}
        try:
            cookiecutter(
                str(_find_template()),
                no_input=True,
                extra_context=context,
                output_dir=str(output),
                default_config=cookiecutter_config,
                # The hook repeats the checks of `new`, in a script that would import from the temporary folder.
                accept_hooks=False,
            )
        except OSError as error:
            raise UsageError(f"cannot write to {output} ({error}); choose another folder with --output") from None
        except CookiecutterException as error:
            raise GymsdkError(f"cannot write the template: {error}") from error


def _find_template() -> Path:
    package = Path(__file__).resolve().parents[1]
    # A wheel contains the template; in a checkout it lies beside the package.
    for folder in (package / "template", package.parent / "cookiecutter-env"):
        if (folder / "cookiecutter.json").is_file():
            return folder
    raise UsageError(
        "this installation of gymsdk lacks its template; reinstall it: pip install --force-reinstall gymsdk"
    )


def _print(name: EnvironmentName, folder: Path) -> None:
    install = shlex.quote(f"./{folder}[dev]" if not folder.is_absolute() else f"{folder}[dev]")
    echo(f"Wrote {folder}: its rows are in {name.module}/data, its verifier in {name.module}/__init__.py.")
    commands = [
        f"pip install -e {install}",
        f"gymsdk check {name.name}",
        f"gymsdk play {name.name} --model scripted/oracle",
    ]
    echo("\n  ".join(["\nNext:", *commands]))


def _print_json(environment_name: EnvironmentName, folder: Path) -> None:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    document = {
        "name": environment_name.name,
        "distribution": environment_name.distribution,
        "module": environment_name.module,
        "folder": str(shorten_path(folder)),
        "files": files,
    }
    print_json(document)
