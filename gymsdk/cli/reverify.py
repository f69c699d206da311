"""`gymsdk reverify`: the rewards of stored rollouts, worked out once more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk.cli import options
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.rollouts.cases import Run
    from gymsdk.rollouts.rejudged import Judge, Rejudged
    from gymsdk.types import Row

EVERY = 10.0
"""Seconds between two lines that say how far it is."""

SHOWN = 50
"""How many changes, and how many rollouts without a reward, are shown to people; `--json` has them all."""


def reverify(  # noqa: PLR0913  # each is an option of the command
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's folder, or a file of rollouts.", show_default=False)
    ],
    *,
    head: options.Head = None,
    settings: options.Set = [],  # noqa: B006  # typer copies it
    agent: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The agent, or the environment, of rollouts that name none."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Take the first N rollouts only.")] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", "--concurrency", min=1, metavar="C", help="Rollouts being judged at once.")
    ] = 64,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the lines as they are now.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Ask servers too that do not say they judge without a session.")
    ] = False,
    fail_on_change: Annotated[
        bool, typer.Option("--fail-on-change", help="Exit with 1 where a reward changed.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Work out the rewards of stored rollouts again.

    The stored run stays as it is; what changes is listed.
    """
    from gymsdk.rollouts.cases import Run

    run = Run(path, agent=agent)
    if output is not None:
        _not_its_own(run, output, overwrite=overwrite)
    found = _Found()
    _followed(_work(run, found, _Asked(head, settings, limit, at_once, output, overwrite, force)))
    _print(found, json=json)
    if found.unscored or (fail_on_change and found.changed):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Asked:
    head: str | None
    settings: list[str]
    limit: int | None
    at_once: int
    output: Path | None
    overwrite: bool
    force: bool


@dataclass(slots=True)
class _Found:
    """What judging once more has come to."""

    rollouts: int = 0
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    changed: list[Row] = field(default_factory=list)
    unscored: list[Row] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)

    def add(self, each: Rejudged) -> None:
        """Count one."""
        case = each.case
        place = {"line": case.number, "environment": case.environment, "task": case.task, "repeat": case.repeat}
        self.rollouts += 1
        if each.judgement is None:
            self.unscored.append({**place, "old": case.reward, "kind": each.kind, "reason": each.reason})
            return
        self.after.append(each.judgement.reward)
        self.before += [] if case.reward is None else [case.reward]
        if each.changed:
            self.changed.append({**place, "old": case.reward, "new": each.judgement.reward})


def _not_its_own(run: Run, output: Path, *, overwrite: bool) -> None:
    from gymsdk.rollouts.sheet import free

    if run.holds(output):
        raise UsageError(f"{output} is the stored run's own, which stays as it is; choose another --output")
    free(output, overwrite=overwrite)


def _followed(work: Any) -> None:
    from contextlib import redirect_stdout
    from sys import stderr

    from gymsdk.cli.running import warnings
    from gymsdk.cli.stopping import Stopped, until_stopped

    with warnings(), redirect_stdout(stderr):
        try:
            until_stopped(work)
        except Stopped as stop:
            raise typer.Exit(stop.code) from None


async def _work(run: Run, found: _Found, asked: _Asked) -> None:
    import asyncio

    from gymsdk import http
    from gymsdk.rollouts.rejudged import elsewhere, has_judges, here, sessionless, wanted
    from gymsdk.rollouts.served import served

    try:
        if asked.head is None:
            async with here(run, options.settings(run.names(), asked.settings)) as judge:
                await _judged(run, judge, found, asked)
            return
        if asked.settings:
            raise UsageError(f"--set {asked.settings[0]}: the servers have their settings; leave out --set")
        judges = await asyncio.to_thread(wanted, run)
        servers = await served(asked.head, lambda found: has_judges(found, judges))
        found.unsure = await sessionless(servers, run, force=asked.force)
        await _judged(run, elsewhere(servers), found, asked)
    finally:
        await http.aclose()


async def _judged(run: Run, judge: Judge, found: _Found, asked: _Asked) -> None:
    from contextlib import aclosing, nullcontext
    from itertools import islice

    from gymsdk import descriptors
    from gymsdk.rollouts.rejudged import rejudged
    from gymsdk.rollouts.sheet import Sheet

    at_once = min(asked.at_once, descriptors.affordable(2))
    ends, said = rejudged(islice(run.cases(), asked.limit), judge, at_once=at_once), time.monotonic()
    with Sheet(asked.output, overwrite=asked.overwrite) if asked.output else nullcontext() as sheet:
        async with aclosing(ends):
            async for each in ends:
                found.add(each)
                if sheet and (line := each.line()) is not None:
                    sheet.add(line)
                if time.monotonic() >= said + EVERY:
                    said = time.monotonic()
                    typer.echo(f"{found.rollouts:,} judged, {len(found.changed):,} rewards changed", err=True)


def _print(found: _Found, *, json: bool) -> None:
    from gymsdk import rows

    if not json:
        typer.echo("\n".join(_lines(found)))
        return
    told = {
        "rollouts": found.rollouts,
        "mean": {"old": _mean(found.before), "new": _mean(found.after)},
        "changed": found.changed,
        "unscored": found.unscored,
        "not_stateless": found.unsure,
    }
    typer.echo(rows.document(told), nl=False)


def _lines(found: _Found) -> Iterator[str]:
    for name in found.unsure:
        yield f"{name} does not say that it judges without a session: these rewards may differ for that alone"
    for each in found.changed[:SHOWN]:
        yield f"{_place(each)}: {_number(each['old'])} is now {_number(each['new'])}"
    yield from _more(found.changed)
    for each in found.unscored[:SHOWN]:
        yield f"{_place(each)}: no reward ({each['kind']}): {each['reason']}"
    yield from _more(found.unscored)
    judged = f"{found.rollouts:,} rollouts judged once more: {len(found.changed):,} rewards changed"
    yield f"{judged}, {len(found.unscored):,} have none now"
    yield f"mean reward {_number(_mean(found.before))}, now {_number(_mean(found.after))}"


def _place(each: Row) -> str:
    return f"{each['environment']} task {each['task']} repeat {each['repeat']}"


def _more(listed: list[Row]) -> Iterator[str]:
    if len(listed) > SHOWN:
        yield f"and {len(listed) - SHOWN:,} more, all in --json"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _mean(rewards: list[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None
