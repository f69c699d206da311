"""`gymsdk new`: a new environment, as a package that installs, is tested and plays."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gymsdk.cli import names, options
from gymsdk.errors import GymsdkError, UsageError

Kind = Annotated[
    Literal["single-turn", "tools"],
    typer.Option(help="A question and a reply, or tools that share a state."),
]
Judge = Annotated[bool, typer.Option("--judge/--no-judge", help="Let another model judge, where one is named.")]
Author = Annotated[str | None, typer.Option(metavar="NAME", help="Whose it is, for the licence.", show_default=False)]
License = Annotated[Literal["Apache-2.0", "MIT", "proprietary"], typer.Option(help="Its licence.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write its folder into.")]


def new(
    name: Annotated[str, typer.Argument(help="The environment's name, as in `gymsdk play NAME`.")],
    *,
    kind: Kind = "single-turn",
    judge: Judge = False,
    author: Author = None,
    license: License = "Apache-2.0",
    output: Output = Path(),
    json: options.Json = False,
) -> None:
    """Write a new environment: a package that installs, tests itself and plays.

    Change its rows and its verifier; `gymsdk check NAME` says what is wrong with them.
    """
    called = names.read(name)
    folder = output / called.distribution
    _refuse_taken(called, folder)
    told = {"name": name, "kind": kind, "judge": judge, "license": license}
    _write(told | ({} if author is None else {"author": _author(author)}), output)
    if json:
        _print_json(called, folder)
        return
    _print(called, folder)


def _refuse_taken(called: names.Name, folder: Path) -> None:
    from gymsdk.plugins import registry

    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} is there already; choose another name, or another folder with --output")
    ours = {names.canonical(called.name), names.canonical(called.distribution)}
    for entry in registry.installed().values():
        if ours & {names.canonical(entry.name), names.canonical(entry.distribution)}:
            home = f"{entry.distribution} {entry.version}"
            raise UsageError(f"an environment named {entry.name!r} is installed already ({home}); choose another name")


def _author(author: str) -> str:
    # Braces are the template language's own: cookiecutter renders what it is told.
    if author.strip() and author.isprintable() and not {"{", "}"} & set(author):
        return author
    raise UsageError(f"--author {author!a}: write a name on one line, without braces, as in 'Ada Lovelace'")


def _write(told: dict[str, Any], output: Path) -> None:
    from tempfile import TemporaryDirectory

    try:
        from cookiecutter.exceptions import CookiecutterException
        from cookiecutter.main import cookiecutter
    except ModuleNotFoundError as error:
        raise UsageError(f'gymsdk new needs cookiecutter: pip install "gymsdk[author]" ({error})') from None
    with TemporaryDirectory() as kept:
        # Its own settings and the record of its runs are in the home folder: neither read nor written here.
        own: Any = {"replay_dir": kept, "cookiecutters_dir": kept}
        try:
            cookiecutter(
                str(_template()), no_input=True, extra_context=told, output_dir=str(output), default_config=own
            )
        except OSError as error:
            raise UsageError(f"{output} cannot be written to ({error}); name another folder with --output") from None
        except CookiecutterException as error:
            raise GymsdkError(f"the template could not be written: {error}") from error


def _template() -> Path:
    package = Path(__file__).resolve().parents[1]
    # A wheel carries the template; a checkout has it beside the package.
    for folder in (package / "template", package.parent / "cookiecutter-env"):
        if (folder / "cookiecutter.json").is_file():
            return folder
    raise UsageError("this installation of gymsdk has no template; reinstall it: pip install --force-reinstall gymsdk")


def _print(called: names.Name, folder: Path) -> None:
    install = shlex.quote(f"./{folder}[dev]" if not folder.is_absolute() else f"{folder}[dev]")
    typer.echo(f"Wrote {folder}: its rows are in {called.module}/data, its verifier in {called.module}/__init__.py.")
    typer.echo(f"\nNext:\n  pip install -e {install}\n  gymsdk check {called.name}\n  gymsdk play {called.name}")


def _print_json(called: names.Name, folder: Path) -> None:
    from gymsdk import rows

    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    told = {
        "name": called.name,
        "distribution": called.distribution,
        "module": called.module,
        "folder": str(folder),
        "files": files,
    }
    typer.echo(rows.document(told), nl=False)
