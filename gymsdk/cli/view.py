"""`gymsdk view`: show runs in the browser."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, Field

from gymsdk.cli import options
from gymsdk.cli.fields import Given, Only, take_models
from gymsdk.cli.output import echo
from gymsdk.cli.process import start_beside
from gymsdk.cli.show import RolloutChoice
from gymsdk.errors import UsageError
from gymsdk.models.options import ModelOptions
from gymsdk.settings import EXPORT, VIEWER, Flag


class ViewOptions(BaseModel):
    """The content and functions of the pages, and the files of `--export`."""

    port: Annotated[int, Flag(VIEWER)] = Field(0, ge=0, le=65535, description="The port; 0 chooses a free one.")
    browser: Annotated[bool, Flag(VIEWER, names=("--browser/--no-browser",))] = Field(
        True, description="Open the browser."
    )
    play: Annotated[bool, Flag(VIEWER)] = Field(
        False,
        description="Let the pages play rollouts again and continue them differently, with your environments and"
        " models.",
    )
    tokenizer: Annotated[str | None, Flag(VIEWER, "NAME", shown=False)] = Field(
        None, description="Show the text of tokens: a file tokenizer.json, or a name or a folder for transformers."
    )
    export: Annotated[Path | None, Flag(EXPORT, "PATH", shown=False)] = Field(
        None,
        description="Write the pages with the runs' data to PATH, a new folder or a file that ends in .html, and exit.",
    )
    sample: Annotated[int | None, Flag(EXPORT, "N", shown=False)] = Field(
        None, ge=1, description="Export at most N rollouts of each run, spread evenly."
    )


@take_models
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="The folders of runs, or JSONL files of rollouts. By default, all runs in rollouts/.",
        ),
    ] = None,
    *,
    viewer: ViewOptions,
    model_options: Annotated[Given[ModelOptions], Only("base_url")],
    choice: Annotated[RolloutChoice, Only("where", "search")],
    with_parent: options.WithParent = False,
) -> None:
    """Show runs in the browser: transcripts, tables, comparisons.

    The viewer listens on this machine only, and needs the token in the printed address. It follows runs that are being
    written.

    Examples:
        gymsdk view
        gymsdk view rollouts/base rollouts/tuned --port 8800
        gymsdk view rollouts/base --export base.html --where 'reward<1'
    """
    from pydantic import SecretStr

    from gymsdk.deploy.process_guard import watch_parent
    from gymsdk.runs.source import DEFAULT_FOLDER, find_run, find_runs
    from gymsdk.studio.app import create_app
    from gymsdk.studio.library import Library
    from gymsdk.studio.player import Player
    from gymsdk.studio.server import ViewerServer
    from gymsdk.tokens.tokenizer import load_token_decoder

    if with_parent:
        # `gymsdk rollout --view` has started this process, and holds its standard input open.
        watch_parent()
    for run in runs or ():
        find_run(run)
    if not runs and not DEFAULT_FOLDER.is_dir():
        raise UsageError(f"there is no folder {DEFAULT_FOLDER}; name the folder of a run, or write one: gymsdk rollout")
    if viewer.export is not None:
        _export(runs or [source.path for source in find_runs(DEFAULT_FOLDER)], viewer.export, choice, viewer.sample)
        return
    if choice.where or choice.search or viewer.sample:
        raise UsageError(
            "--where, --search and --sample choose what --export writes; the pages have filters of their own"
        )
    if model_options and not viewer.play:
        raise UsageError("--base-url names the models that play on; add --play")
    player = Player(model_options.get("base_url")) if viewer.play else None
    decode = load_token_decoder(viewer.tokenizer) if viewer.tokenizer else None
    token = secrets.token_urlsafe(24)
    library = Library(runs or (), None if runs else DEFAULT_FOLDER)
    app = create_app(library, SecretStr(token), player=player, decode=decode)
    # Bound before the address is printed, so that the browser does not come too early.
    with _bind(viewer.port) as listening:
        # Browsers never send the part after `#`, so that the token is in no log and no referrer.
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/#token={token}"
        echo(url)
        if viewer.browser:
            webbrowser.open(url)
        ViewerServer(app, library).run(sockets=[listening])


def _export(runs: list[Path], target: Path, choice: RolloutChoice, sample: int | None) -> None:
    from gymsdk.runs import build_filter
    from gymsdk.studio.export import ExportChoice, export_runs

    count = export_runs(runs, target, ExportChoice(build_filter(choice.where, choice.search), sample))
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    page = target if target.is_file() else target / "index.html"
    echo(f"{page}: {count} rollouts, {size / 1e6:.1f} MB")


@contextmanager
def run_viewer(folder: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that starts the viewer of the run in *folder* in a separate process.

    At the end of the context, the viewer stays open until Ctrl-C if a person sees it, and ends otherwise. It ends with
    this process in any case.
    """
    process: subprocess.Popen[bytes] | None = None

    def start() -> None:
        nonlocal process
        process = start_beside("view", str(folder), *([] if sys.stderr.isatty() else ["--no-browser"]))

    try:
        yield start
        if process is not None and sys.stderr.isatty():
            typer.echo("the viewer stays open; press Ctrl-C to close it", err=True)
            with suppress(KeyboardInterrupt):
                process.wait()
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def _bind(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"port {port} cannot be used ({error.strerror}); choose another --port") from error
