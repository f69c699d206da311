"""`gymsdk export`: write training files from stored rollouts, or send runs to W&B, MLflow or OpenTelemetry."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, Field

from gymsdk.cli import options
from gymsdk.cli.fields import take_models
from gymsdk.cli.output import echo, print_json
from gymsdk.cli.process import start_beside
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.rollouts.settings import Selection
from gymsdk.settings import OUTPUT, SERVICE, Flag
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from gymsdk.exporters import ExportOptions
    from gymsdk.rollouts.export import ExportReport
    from gymsdk.runs import Run
    from gymsdk.types import Row

FOLLOW_SECONDS = 1.0
"""How often a followed run is looked at."""

FINISH_SECONDS = 120.0
"""The time that an export beside a run gets at the end of the run."""


class Targets(BaseModel):
    """The written files, and the data that a service receives."""

    sft: Annotated[Path | None, Flag(OUTPUT, "FILE", shown=False)] = Field(
        None, description="Write conversations for supervised fine-tuning to this JSONL file."
    )
    dpo: Annotated[Path | None, Flag(OUTPUT, "FILE", shown=False)] = Field(
        None, description="Write pairs of a better and a worse conversation to this JSONL file."
    )
    project: Annotated[str, Flag(SERVICE, "NAME")] = Field(
        "gymsdk", description="The project of W&B, the experiment of MLflow, or the service name of OpenTelemetry."
    )
    content: Annotated[bool | None, Flag(SERVICE, names=("--content/--no-content",), shown=False)] = Field(
        None,
        description="Send the texts of the conversations. W&B and MLflow get them by default, OpenTelemetry does not.",
    )
    follow: Annotated[bool, Flag(SERVICE)] = Field(False, description="Send new rollouts until the run has ended.")


@take_models
def export(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [SERVICE]",
            help="The folders of runs; behind them, the service that they are sent to: wandb, mlflow or otel.",
        ),
    ],
    *,
    targets: Targets,
    selection: Selection,
    with_parent: options.WithParent = False,
    json: options.Json = False,
) -> None:
    """Write training files from runs, or send runs to a service.

    The files have the formats of TRL, Axolotl and Unsloth, and `datasets` loads them. The services are Weights & Biases
    (`gymsdk[wandb]`), MLflow (`gymsdk[mlflow]`) and collectors of OpenTelemetry (`gymsdk[otel]`).

    Examples:
        gymsdk export rollouts/math-20260101-120000 --sft train.jsonl
        gymsdk export first second --dpo pairs.jsonl --min-gap 0.5
        gymsdk export rollouts/math-20260101-120000 wandb --project my-project
    """
    from gymsdk.exporters import EXTRAS, ExportOptions

    *folders, last = runs
    if last in EXTRAS:
        if targets.sft is not None or targets.dpo is not None:
            raise UsageError(f"--sft and --dpo write files; leave them out to send runs to {last}")
        content = last != "otel" if targets.content is None else targets.content
        chosen = ExportOptions(targets.project, content)
        for sent in _send(list(map(Path, folders)), last, chosen, follow=targets.follow, beside=with_parent):
            echo(_format_sent(sent, json=json), err=with_parent)
        return
    if targets.content is not None or targets.follow or targets.project != "gymsdk":
        raise UsageError(
            f"--project, --content and --follow belong to a service; name one behind the runs: {', '.join(EXTRAS)}"
        )
    # A single word is a run; behind a run, a word that is no path may be a misspelled service.
    if folders and targets.sft is None and targets.dpo is None and not Path(last).exists():
        hint = format_suggestion(last, EXTRAS, f"the services are {', '.join(EXTRAS)}")
        raise UsageError(f"there is no run and no service {last!r}{hint}")
    _write_files(list(map(Path, runs)), targets, selection, json=json)


def _write_files(runs: list[Path], targets: Targets, selection: Selection, *, json: bool) -> None:
    from gymsdk import line
    from gymsdk.rollouts.export import ExportReport, export_dpo, export_sft
    from gymsdk.runs import find_run

    if targets.sft is None and targets.dpo is None:
        raise UsageError("name the file to write with --sft or --dpo, or a service behind the runs")
    sources, reports = list(map(find_run, runs)), {}
    for path, write in ((targets.sft, export_sft), (targets.dpo, export_dpo)):
        if path is not None:
            report = ExportReport()
            rollouts = chain.from_iterable(line.read(source.rollouts) for source in sources if source.rollouts.exists())
            _write(path, write(rollouts, selection, report))
            reports[str(shorten_path(path))] = report
    if json:
        content = {name: report.to_json() for name, report in reports.items()}
        print_json(content)
    else:
        for name, report in reports.items():
            typer.echo("\n".join(_format_report(name, report)), err=True)
    if not all(report.written for report in reports.values()):
        raise typer.Exit(1)


def _send(runs: list[Path], service: str, chosen: ExportOptions, *, follow: bool, beside: bool) -> Iterator[Row]:
    """Send *runs*, and yield for each its name, the number of its rollouts and its address."""
    from gymsdk.exporters import build_exporter, export_run
    from gymsdk.runs import read

    if not runs:
        raise UsageError(f"name the folder of the run to send to {service}")
    if follow and len(runs) > 1:
        raise UsageError("--follow sends one run; name one folder")
    for folder in runs:
        with read(folder) as run:
            wait = _follow_run(run, with_parent=beside) if follow else None
            exporter = build_exporter(service, run, chosen)
            count = export_run(run, exporter, wait)
            yield {"run": run.name, "rollouts": count, "destination": exporter.finish()}


def _format_sent(sent: Row, *, json: bool) -> str | bytes:
    if json:
        from gymsdk import jsonl

        return jsonl.dump_portable_json(sent)
    return f"{sent['run']}: {sent['rollouts']} rollouts; {sent['destination']}"


def _follow_run(run: Run, *, with_parent: bool) -> Callable[[], bool]:
    """Return a function that waits for new rollouts of *run*, and returns whether the run goes on.

    Args:
        with_parent: Whether the run ends with the parent process, which closes its end of the standard input then.
            Otherwise, it ends when its metrics are written. Ctrl-C and SIGTERM end the waiting in both cases.
    """
    from gymsdk.deploy.process_guard import watch_parent

    stopped = threading.Event()
    # A signal ends the waiting only: the service still gets the rest, and the mark that the run has ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    if with_parent:
        watch_parent()

    def wait() -> bool:
        return not stopped.wait(FOLLOW_SECONDS) and (with_parent or not run.metrics)

    return wait


@contextmanager
def run_exporter(folder: Path, service: str) -> Iterator[Callable[[], None]]:
    """Yield a function that starts to send the run in *folder* to a service, in a separate process.

    At the end of the context, the process gets the time to send the rest.

    Raises:
        UsageError: The extra of the service is not installed, before anything is played.
    """
    from gymsdk.exporters import check_extra

    check_extra(service)
    process: subprocess.Popen[bytes] | None = None

    def start() -> None:
        nonlocal process
        process = start_beside("export", str(folder), service, "--follow")

    try:
        yield start
    finally:
        if process is not None:
            _finish(process, f"gymsdk export {shorten_path(folder)} {service}")


def _finish(process: subprocess.Popen[bytes], command: str) -> None:
    """Let *process* send the rest; print the *command* that repeats the export if that fails."""
    assert process.stdin is not None
    # The export takes the end of its standard input for the end of the run.
    process.stdin.close()
    try:
        code = process.wait(FINISH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        typer.echo(f"the export has failed, the run has not; repeat the export with: {command}", err=True)


def _write(path: Path, lines: Iterator[Row]) -> None:
    """Write *lines* to a new file that replaces *path* when it is complete."""
    from gymsdk import jsonl

    # Beside the file, because a file can only be replaced from within its file system.
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.writelines(map(jsonl.dump_row, lines))
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error})") from error
    finally:
        part.unlink(missing_ok=True)


def _format_report(path: str, report: ExportReport) -> Iterator[str]:
    yield f"{path}: {report.written} lines from {report.rollouts} scored rollouts"
    yield from (f"  {count} left out: {reason}" for reason, count in report.left_out.most_common() if count)
