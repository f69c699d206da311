"""A person at the terminal, in a model's place."""

from __future__ import annotations

import os
import sys
from functools import partial

import typer

from gymsdk import wire
from gymsdk.errors import Failed
from gymsdk.transcript import Item, text_of
from gymsdk.turns import of_policy
from gymsdk.types import Episode, Model
from gymsdk.workers.threads import Threads

HELP = "Write a reply, or `/call TOOL {JSON}`; `/tools` shows the tools, `/quit` ends."


class Shown:
    """*model*, with both sides of the conversation shown as it goes, on standard error where *aside*."""

    def __init__(self, model: Model, *, aside: bool = False) -> None:
        self._model = model
        self._aside = aside
        self._seen = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Show what is new, answer, and show the answer."""
        history: list[Item] = request["input"]
        show_new(history, self._seen, aside=self._aside)
        self._seen = len(history)
        response = await self._model.respond(request, episode=episode)
        for item in response["output"]:
            show(item, aside=self._aside)
        return response


class Person:
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
            self._say(HELP)
        show_new(history, self._seen, aside=self._aside)
        self._seen = len(history)
        return wire.response([await self._read_action(request.get("tools") or [])], model="person", request=request)

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
                self._say("\n".join(map(_described, tools)) or "There are no tools.")
            elif command == "/call" and rest.strip():
                name, _, arguments = rest.strip().partition(" ")
                return wire.function_call(name, arguments.strip() or "{}")
            elif command.startswith("/"):
                self._say(HELP)
            elif command:
                return wire.message(line)


class Keyboard:
    """Lines of standard input, read in a thread that nobody has to wait for when the person leaves."""

    def __init__(self) -> None:
        self._threads = Threads()
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


def _described(tool: Item) -> str:
    from gymsdk import rows

    parameters = (tool.get("parameters") or {}).get("properties", {})
    given = "".join(f"\n    {name}: {rows.written(shape).decode()}" for name, shape in parameters.items())
    return f"  {tool['name']}: {tool.get('description') or ''}".rstrip(": ") + given


def show_new(history: list[Item], seen: int, *, aside: bool) -> None:
    """Print what the environment has said since *seen* items were there; the player's own words stand there already."""
    for item in history[seen:]:
        if not (seen and of_policy(item)):
            show(item, aside=aside)


def show(item: Item, *, aside: bool = False) -> None:
    """Print one item of a conversation, on standard error where *aside*."""
    kind = item.get("type", "message")
    if kind == "function_call":
        typer.secho(f"call {item['name']} {item['arguments']}", fg="cyan", err=aside)
    elif kind == "function_call_output":
        typer.secho(f"output {text_of(item['output'])}", fg="yellow", err=aside)
    elif kind == "reasoning":
        typer.secho("".join(text_of(part.get("text")) for part in item.get("summary", [])), dim=True, err=aside)
    else:
        typer.secho(f"{item.get('role', '')}: ", bold=True, nl=False, err=aside)
        typer.echo(text_of(item.get("content")), err=aside)
