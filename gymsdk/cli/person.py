"""A person at the terminal, in a model's place."""

from __future__ import annotations

import asyncio

import typer

from gymsdk import wire
from gymsdk.errors import Failed
from gymsdk.turns import of_policy
from gymsdk.types import Episode, Item, Model, text_of

HELP = "Write a reply, or `/call TOOL {JSON}`; `/tools` shows the tools, `/quit` ends."


class Shown:
    """*model*, with both sides of the conversation shown as it goes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._seen = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Show what is new, answer, and show the answer."""
        history: list[Item] = request["input"]
        for item in history[self._seen :]:
            if not (self._seen and of_policy(item)):
                show(item)
        response = await self._model.respond(request, episode=episode)
        for item in response["output"]:
            show(item)
        self._seen = len(history)
        return response


class Person:
    """Whoever sits at the terminal; raises `Failed` when they leave."""

    def __init__(self) -> None:
        self._seen = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002  # the protocol
        """Show what is new and read a reply or a call."""
        history: list[Item] = request["input"]
        if not self._seen:
            typer.echo(HELP)
        for item in history[self._seen :]:
            if not (self._seen and of_policy(item)):
                show(item)
        self._seen = len(history)
        return wire.response([await self._act(request.get("tools") or [])], model="person", request=request)

    async def _act(self, tools: list[Item]) -> Item:
        while True:
            try:
                line = await asyncio.to_thread(input, "> ")
            except EOFError:
                line = "/quit"
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                raise Failed("the person left", kind="person_left")
            if command == "/tools":
                for tool in tools:
                    typer.echo(f"  {tool['name']}: {tool.get('description', '')} {tool.get('parameters')}")
            elif command == "/call":
                name, _, arguments = rest.partition(" ")
                return wire.function_call(name, arguments or "{}")
            elif line.strip():
                return wire.message(line)


def show(item: Item) -> None:
    """Print one item of a conversation."""
    kind = item.get("type", "message")
    if kind == "function_call":
        typer.secho(f"call {item['name']} {item['arguments']}", fg="cyan")
    elif kind == "function_call_output":
        typer.secho(f"output {text_of(item['output'])}", fg="yellow")
    elif kind == "reasoning":
        typer.secho("".join(text_of(part.get("text")) for part in item.get("summary", [])), dim=True)
    else:
        typer.secho(f"{item.get('role', '')}: ", bold=True, nl=False)
        typer.echo(text_of(item.get("content")))
