"""`gymsdk play`: one episode in the terminal, played by a person or a model."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gymsdk import responses
from gymsdk.cli import options
from gymsdk.cli.tracebacks import Traceback
from gymsdk.errors import Failed
from gymsdk.responses import is_policy_item
from gymsdk.threads import ThreadPool
from gymsdk.types import Episode, Item, Model, extract_text

if TYPE_CHECKING:
    from pathlib import Path

    from gymsdk.environment import Environment
    from gymsdk.types import Model, Rollout, Row

PLAY_SECONDS = 86_400.0
"""Seconds a person may take."""

MAX_SEARCHED_TASKS = 100_000
"""Among how many tasks of a split one is looked for: a split may have no end."""


def play(  # noqa: PLR0913  # each is an option of the command
    name: Annotated[str, typer.Argument(help="The environment.")],
    *,
    model: Annotated[
        str | None, typer.Option(metavar="PROVIDER/NAME", help="Who plays; you, if none is named.")
    ] = None,
    base_url: options.BaseUrl = [],  # noqa: B006  # typer copies it
    api: options.Api = None,
    pin: options.Pin = [],  # noqa: B006  # typer copies it
    token_ids: options.TokenIds = False,
    tasks: options.Tasks = None,
    split: options.Split = None,
    task: Annotated[int, typer.Option(min=0, metavar="N", help="Which task, counted from 0.")] = 0,
    seed: options.Seed = 0,
    settings: options.Settings = [],  # noqa: B006  # typer copies it
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    max_output_tokens: options.MaxOutputTokens = None,
    param: options.Param = [],  # noqa: B006  # typer copies it
    gym: Annotated[bool, typer.Option("--gym", help="Play it through Gymnasium: gymnasium.make, reset, step.")] = False,
    traceback: Traceback = False,  # noqa: ARG001  # its callback does the work
    json: Annotated[
        bool, typer.Option("--json", help="Print the rollout as JSON, all else to standard error.")
    ] = False,
) -> None:
    """Play one episode and show its verdict."""
    from functools import partial

    from gymsdk.cli.stopping import Stopped, run_interruptibly, run_until_signal
    from gymsdk.models import registry as models
    from gymsdk.plugins import registry
    from gymsdk.rollouts.jobs import stamped
    from gymsdk.rollouts.tasks import one_source

    one_source(tasks, split)
    configured = options.parse_settings([name], settings)[name]
    environment = registry.load(name, **configured)
    sampling = options.parse_sampling(
        temperature=temperature, top_p=top_p, max_output_tokens=max_output_tokens, params=param
    )
    row = stamped(_find_row(environment, tasks, split, seed, task), environment=name, task=task, sampling=sampling)
    player: Model = HumanPolicy(aside=json)
    if model:
        pinned = options.parse_pins(pin)
        named = models.model(model, base_url=options.join_base_urls(base_url), api=api, pinned=pinned, tokens=token_ids)
        player = PrintingModel(named, aside=json)
    try:
        if gym:
            rollout = run_interruptibly(partial(_play_through_gymnasium, name, configured, player, row, seed))
        else:
            rollout = run_until_signal(_play_episode(environment, player, row, seed))
    except Stopped as stop:
        raise typer.Exit(stop.code) from None
    _print_rollout(rollout, json=json)
    if rollout.failure:
        raise typer.Exit(1)


def _find_row(environment: Environment, tasks: Path | None, split: str | None, seed: int, task: int) -> Row:
    from itertools import islice

    from gymsdk.errors import BadRow
    from gymsdk.rollouts.tasks import default_split, from_file, from_splits

    if tasks is None and task >= MAX_SEARCHED_TASKS:
        advice = "write the rows with `gymsdk tasks` and name them with --tasks"
        raise BadRow(
            f"--task {task} is beyond the first {MAX_SEARCHED_TASKS:,} tasks of a split; take a lower one, or {advice}"
        )
    named = {environment.name: environment}
    if tasks is None:
        split = split or default_split(environment)
        found = from_splits(named, split, seed=seed, limit=task + 1)
    else:
        found = from_file(named, tasks, limit=task + 1)
    for _, row in islice(found, task, None):
        return row
    raise BadRow(f"--task {task}: {tasks or f'split {split!r}'} has no task with that number; they count from 0")


async def _play_episode(environment: Environment, model: Model, row: Row, seed: int) -> Rollout:
    from gymsdk.episode import Budget, play
    from gymsdk.http import client
    from gymsdk.rollouts.jobs import jobs, seed_of

    job = next(jobs([row]))
    budget = Budget(seconds=PLAY_SECONDS)
    try:
        async with environment:
            return await play(environment, model, job.row, seed=seed_of(seed, job), id=job.id, budget=budget)
    finally:
        await client.aclose()


def _play_through_gymnasium(name: str, settings: dict[str, Any], model: Model, row: Row, seed: int) -> Rollout:
    from gymsdk.gym import loop
    from gymsdk.gym.policy import made, rollout
    from gymsdk.http import client
    from gymsdk.rollouts.jobs import jobs, seed_of

    job = next(jobs([row]))
    env = made(name, seconds=PLAY_SECONDS, settings=settings)
    try:
        played = rollout(env, model, seed=seed_of(seed, job), options={"task": job.row}, timeout=PLAY_SECONDS)
    finally:
        env.close()
        loop.run(client.aclose())
    return played.model_copy(update={"id": job.id, "row": job.row})


def _print_rollout(rollout: Rollout, *, json: bool) -> None:
    if json:
        typer.echo(rollout.model_dump_json(indent=2))
    elif rollout.failure:
        failure = rollout.failure
        typer.secho(f"{rollout.outcome} in {failure.stage} ({failure.kind}): {failure.message}", fg="red")
    else:
        typer.secho(f"reward {rollout.reward:g}", bold=True, nl=False)
        turns = "1 turn" if rollout.turns == 1 else f"{rollout.turns} turns"
        typer.echo(f" (ended: {rollout.ended}; {turns}; {rollout.timing.total:.0f} ms)")
        fields = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"}) if rollout.verdict else {}
        for key, value in {**rollout.components, **fields}.items():
            typer.echo(f"  {key}: {value:g}" if isinstance(value, float) else f"  {key}: {value}")


PROMPT_HELP = "Write a reply, or `/call TOOL {JSON}`; `/tools` shows the tools, `/quit` ends."


class PrintingModel:
    """*model*, with both sides of the conversation shown as it goes, on standard error where *aside*."""

    def __init__(self, model: Model, *, aside: bool = False) -> None:
        self._model = model
        self._aside = aside
        self._seen = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Show what is new, answer, and show the answer."""
        history: list[Item] = request["input"]
        print_new_items(history, self._seen, aside=self._aside)
        self._seen = len(history)
        response = await self._model.respond(request, episode=episode)
        for item in response["output"]:
            print_item(item, aside=self._aside)
        return response


class HumanPolicy:
    """Whoever sits at the terminal; raises `Failed` when they leave."""

    def __init__(self, *, aside: bool = False) -> None:
        self._aside = aside
        self._seen = 0
        self._keyboard = Keyboard()
        self._say = partial(typer.echo, err=aside)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002  # the protocol
        """Show what is new and read a reply or a call."""
        history: list[Item] = request["input"]
        if not self._seen:
            self._say(PROMPT_HELP)
        print_new_items(history, self._seen, aside=self._aside)
        self._seen = len(history)
        return responses.build_response(
            [await self._read_action(request.get("tools") or [])], model="person", request=request
        )

    async def _read_action(self, tools: list[Item]) -> Item:
        while True:
            self._say("> ", nl=False)
            line = await self._keyboard.read_line()
            if not sys.stdin.isatty():
                self._say(line or "")
            line = "/quit" if line is None else line
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                raise Failed("the person left", kind="person_left")
            if command == "/tools":
                self._say("\n".join(map(_describe_tool, tools)) or "There are no tools.")
            elif command == "/call" and rest.strip():
                name, _, arguments = rest.strip().partition(" ")
                return responses.build_function_call(name, arguments.strip() or "{}")
            elif command.startswith("/"):
                self._say(PROMPT_HELP)
            elif command:
                return responses.build_message(line)


class Keyboard:
    """Lines of standard input, read in a thread that nobody has to wait for when the person leaves."""

    def __init__(self) -> None:
        self._threads = ThreadPool()
        self._rest = b""
        self._ended = False

    async def read_line(self) -> str | None:
        """Give the next line without its newline, `None` at the end."""
        while b"\n" not in self._rest and not self._ended:
            # Not `input()`: a thread left in it aborts the interpreter's exit.
            read = await self._threads.run(os.read, sys.stdin.fileno(), 65536)
            self._rest += read
            self._ended = not read
        if not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")


def _describe_tool(tool: Item) -> str:
    from gymsdk import jsonl

    parameters = (tool.get("parameters") or {}).get("properties", {})
    given = "".join(f"\n    {name}: {jsonl.dump_portable_json(shape).decode()}" for name, shape in parameters.items())
    return f"  {tool['name']}: {tool.get('description') or ''}".rstrip(": ") + given


def print_new_items(history: list[Item], seen: int, *, aside: bool) -> None:
    """Print what the environment has said since *seen* items were there; the player's own words stand there already."""
    for item in history[seen:]:
        if not (seen and is_policy_item(item)):
            print_item(item, aside=aside)


def print_item(item: Item, *, aside: bool = False) -> None:
    """Print one item of a conversation, on standard error where *aside*."""
    kind = item.get("type", "message")
    if kind == "function_call":
        typer.secho(f"call {item['name']} {item['arguments']}", fg="cyan", err=aside)
    elif kind == "function_call_output":
        typer.secho(f"output {extract_text(item['output'])}", fg="yellow", err=aside)
    elif kind == "reasoning":
        typer.secho("".join(extract_text(part.get("text")) for part in item.get("summary", [])), dim=True, err=aside)
    else:
        typer.secho(f"{item.get('role', '')}: ", bold=True, nl=False, err=aside)
        typer.echo(extract_text(item.get("content")), err=aside)
