"""`gymsdk replay`: play stored rollouts again, and continue them in another way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gymsdk.cli import options
from gymsdk.cli.process import Traceback
from gymsdk.errors import UsageError

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.rollouts.replay import Branch, Replayed, StoredEpisode
    from gymsdk.runs import Run
    from gymsdk.types import Budget, Row

BRANCH = "Branch"

MAX_CONCURRENCY = 16
"""The number of replays that are played at the same time."""


def replay(  # noqa: PLR0913  # each is an option of the command
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID...]", help="The rollouts, such as 3:0. By default, all with a response."),
    ] = None,
    *,
    to_turn: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="K",
            help="Replay the first K turns, and then continue with --say or --then.",
            show_default=False,
            rich_help_panel=BRANCH,
        ),
    ] = None,
    say: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Say the turn in FILE next: text, or JSON with the items of a turn.",
            show_default=False,
            rich_help_panel=BRANCH,
        ),
    ] = None,
    then: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Let this model play on.", show_default=False, rich_help_panel=BRANCH),
    ] = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Play the branch N times.", rich_help_panel=BRANCH)
    ] = 1,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Go on after the environment has answered differently.", rich_help_panel=options.RUN
        ),
    ] = False,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    output: options.Output = None,
    overwrite: options.Overwrite = False,
    traceback: Traceback = False,  # noqa: ARG001  # its callback does the work
    json: options.Json = False,
) -> None:
    """Play stored rollouts again, or continue one differently.

    Without --say and --then, the command compares the items of the environment and the rewards with the stored ones;
    the exit code is 1 if one differs. A branch is written to a folder as a run of its own.

    Examples:
        gymsdk replay rollouts/math-20260101-120000
        gymsdk replay rollouts/base 3:0 --to-turn 2 --then vllm/NAME --base-url http://HOST:8000/v1 --repeats 8
        gymsdk replay rollouts/base 3:0 --to-turn 1 --say turn.json --then scripted/oracle
    """
    from gymsdk import runs

    with runs.read(run) as stored:
        episodes = list(_choose_episodes(stored, ids))
        environments = _load_environments(stored, episodes, settings)
        budget = _get_budget(stored)
        if say is None and then is None:
            if to_turn is not None or repeats != 1 or output is not None:
                raise UsageError("--to-turn, --repeats and --output belong to a branch; add --say FILE or --then MODEL")
            _compare(episodes, environments, budget, force=force, json=json)
            return
        if len(episodes) != 1 or not ids:
            raise UsageError("a branch continues one rollout; name its ID, such as 3:0")
        branch = _build_branch(episodes[0], to_turn, say, then, base_url)
        replays = _play(episodes * repeats, environments, budget, branch, force=force)
        _write(stored, replays, branch, output or Path(), then, overwrite=overwrite, is_dated=output is None, json=json)


def _choose_episodes(stored: Run, ids: list[str] | None) -> Iterator[StoredEpisode]:
    from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
    from gymsdk.rollouts.folder import RunFolder
    from gymsdk.rollouts.replay import parse_episode

    inputs: dict[tuple[int, int], Row] = {}
    if stored.source.inputs.exists():
        inputs = {(row[TASK_INDEX], row[ROLLOUT_INDEX]): row for row in RunFolder(stored.source.folder).read_inputs()}
    if ids:
        for name in ids:
            row = stored.queries.find(name)
            if row is None:
                raise UsageError(f"{stored.source.path} has no rollout {name!r}; `gymsdk show` lists some")
            yield parse_episode(stored.queries.read_line(row["id"]), inputs)
        return
    found = [parse_episode(line, inputs) for line in stored if line.get("reward") is not None]
    if not found:
        raise UsageError(f"{stored.source.path} has no rollout with a reward")
    yield from found


def _load_environments(stored: Run, episodes: list[StoredEpisode], settings: list[str]) -> dict[str, Environment]:
    from gymsdk.plugins import registry

    names = list(dict.fromkeys(each.environment for each in episodes))
    given = options.parse_settings(names, settings)
    described = stored.settings.get("environments") or {}
    return {
        name: registry.load(name, **{**((described.get(name) or {}).get("settings") or {}), **given[name]})
        for name in names
    }


def _get_budget(stored: Run) -> Budget:
    from gymsdk.types import Budget

    return Budget.model_validate(stored.settings.get("budget") or {})


def _build_branch(
    stored: StoredEpisode, to_turn: int | None, say: Path | None, then: str | None, base_url: list[str]
) -> Branch:
    from gymsdk.models.registry import model
    from gymsdk.rollouts.replay import Branch, read_turn

    most = len(stored.turns)
    turn = most if to_turn is None else to_turn
    if turn > most:
        raise UsageError(f"--to-turn {turn}: rollout {stored.id} has {most} turns")
    player = model(then, base_url=options.join_base_urls(base_url)) if then else None
    return Branch(turn, read_turn(say) if say else (), player)


def _play(
    episodes: list[StoredEpisode],
    environments: dict[str, Environment],
    budget: Budget,
    branch: Branch | None,
    *,
    force: bool,
) -> list[Replayed]:
    from gymsdk.cli.process import run_in_new_loop
    from gymsdk.http import client
    from gymsdk.rollouts.replay import open_environments
    from gymsdk.rollouts.replay import replay as play_again

    async def play_all() -> list[Replayed]:
        limit = asyncio.Semaphore(MAX_CONCURRENCY)

        async def play_one(each: StoredEpisode) -> Replayed:
            async with limit:
                return await play_again(environments[each.environment], each, branch, budget=budget, force=force)

        try:
            async with open_environments(list(environments.values())):
                return await asyncio.gather(*map(play_one, episodes))
        finally:
            await client.aclose()

    return run_in_new_loop(play_all())


def _compare(
    episodes: list[StoredEpisode], environments: dict[str, Environment], budget: Budget, *, force: bool, json: bool
) -> None:
    from gymsdk import jsonl

    replays = _play(episodes, environments, budget, None, force=force)
    different = [each for each in replays if not each.is_equal]
    if json:
        content = [
            {
                "id": each.stored.id,
                "environment": each.stored.environment,
                "equal": each.is_equal,
                "diverged": each.diverged,
                "stored_reward": each.stored.reward,
                "reward": each.rollout.reward,
            }
            for each in replays
        ]
        typer.echo(jsonl.dump_document(content), nl=False)
    else:
        for each in different:
            typer.echo(_describe(each))
        typer.echo(f"{len(replays) - len(different)} of {len(replays)} rollouts are equal: items and reward")
    if different:
        raise typer.Exit(1)


def _describe(each: Replayed) -> str:
    name = f"{each.stored.environment} {each.stored.id}"
    if each.rollout.failure is not None:
        return f"{name}: {each.rollout.failure.message}"
    if each.diverged is not None:
        return f"{name}: diverged at item {each.diverged}; reward {each.rollout.reward:g}, stored {each.stored.reward}"
    return f"{name}: reward {each.rollout.reward:g}, stored {each.stored.reward}"


def _write(  # each decides where or how the branch is written
    stored: Run,
    replays: list[Replayed],
    branch: Branch,
    output: Path,
    then: str | None,
    *,
    overwrite: bool,
    is_dated: bool,
    json: bool,
) -> None:
    from gymsdk import jsonl
    from gymsdk.cli.progress import name_dated_folder
    from gymsdk.errors import BadOutput
    from gymsdk.rollouts.folder import RunFolder
    from gymsdk.rollouts.plan import Plan
    from gymsdk.rollouts.replay import write_branches

    folder = name_dated_folder(["branch", stored.name]) if is_dated else output
    name = replays[0].stored.environment
    plan = Plan(environments={name: {}}, model=then or "edited")
    with RunFolder(folder) as opened:
        if opened.holds_run and not overwrite:
            raise BadOutput(f"{folder} holds a run; replace it with --overwrite, or choose another --output")
        write_branches(opened, plan, replays, stored.name, branch)
    rewards = [each.rollout.reward for each in replays]
    if json:
        content = {"folder": str(folder), "rewards": rewards, "stored_reward": replays[0].stored.reward}
        typer.echo(jsonl.dump_document(content), nl=False)
    else:
        for number, each in enumerate(replays):
            failure = each.rollout.failure
            result = failure.message if failure else f"reward {each.rollout.reward:g}, {each.rollout.turns} turns"
            typer.echo(f"{each.stored.task}:{number}  {result}")
        typer.echo(f"stored reward {replays[0].stored.reward}; the branch is in {folder}")
    if any(each.rollout.failure for each in replays):
        raise typer.Exit(1)
