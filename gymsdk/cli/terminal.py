"""Models at the terminal: a person who plays, and a model that prints the conversation."""

from __future__ import annotations

import os
import sys
from functools import partial

from gymsdk import responses
from gymsdk.cli.output import echo, secho
from gymsdk.concurrency import ThreadPool
from gymsdk.errors import Failed
from gymsdk.types import Episode, Item, Model, extract_text, is_policy_item

PROMPT_HELP = "Write a reply, or `/call TOOL {JSON}`; `/tools` shows the tools, `/quit` ends."


class PrintingModel:
    """A model that prints both sides of the conversation while it plays.

    Args:
        to_stderr: Print to standard error instead of standard output.
    """

    def __init__(self, model: Model, *, to_stderr: bool = False) -> None:
        self._model = model
        self._to_stderr = to_stderr
        self._seen = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Print new items of the conversation, ask the model, and print its response."""
        history: list[Item] = request["input"]
        print_new_items(history, self._seen, to_stderr=self._to_stderr)
        self._seen = len(history)
        response = await self._model.respond(request, episode=episode)
        for item in response["output"]:
            print_item(item, to_stderr=self._to_stderr)
        return response


class HumanPolicy:
    """A person at the terminal as a model. Raises `Failed` when the person quits."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._to_stderr = to_stderr
        self._seen = 0
        self._keyboard = Keyboard()
        self._print = partial(echo, err=to_stderr)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:  # noqa: ARG002  # the protocol
        """Print new items of the conversation, then read a reply or a tool call."""
        history: list[Item] = request["input"]
        if not self._seen:
            self._print(PROMPT_HELP)
        print_new_items(history, self._seen, to_stderr=self._to_stderr)
        self._seen = len(history)
        return responses.build_response(
            [await self._read_action(request.get("tools") or [])], model="person", request=request
        )

    async def _read_action(self, tools: list[Item]) -> Item:
        while True:
            self._print("> ", nl=False)
            line = await self._keyboard.read_line()
            # A terminal shows the typed text, a pipe does not.
            if not sys.stdin.isatty():
                self._print(line or "")
            line = "/quit" if line is None else line
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                raise Failed("the person at the terminal quit the episode", kind="person_left")
            if command == "/tools":
                self._print("\n".join(map(_describe_tool, tools)) or "There are no tools.")
            elif command == "/call" and rest.strip():
                name, _, arguments = rest.strip().partition(" ")
                return responses.build_function_call(name, arguments.strip() or "{}")
            elif command.startswith("/"):
                self._print(PROMPT_HELP)
            elif command:
                return responses.build_message(line)


class Keyboard:
    """Read lines from standard input in a thread, which does not delay the exit when the person quits."""

    def __init__(self) -> None:
        self._threads = ThreadPool()
        self._buffer = b""
        self._ended = False

    async def read_line(self) -> str | None:
        """Return the next line without its newline, or `None` at the end of the input."""
        while b"\n" not in self._buffer and not self._ended:
            # Not `input()`: a thread left in it aborts the interpreter's exit.
            chunk = await self._threads.run(os.read, sys.stdin.fileno(), 65536)
            self._buffer += chunk
            self._ended = not chunk
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")


def _describe_tool(tool: Item) -> str:
    from gymsdk import jsonl

    parameters = (tool.get("parameters") or {}).get("properties", {})
    lines = "".join(f"\n    {name}: {jsonl.dump_portable_json(schema).decode()}" for name, schema in parameters.items())
    return f"  {tool['name']}: {tool.get('description') or ''}".rstrip(": ") + lines


def print_new_items(history: list[Item], seen: int, *, to_stderr: bool) -> None:
    """Print the items after the first *seen*, except the policy's own items, which are on the screen already."""
    for item in history[seen:]:
        if not (seen and is_policy_item(item)):
            print_item(item, to_stderr=to_stderr)


def print_item(item: Item, *, to_stderr: bool = False) -> None:
    """Print one item of a conversation, to standard error if *to_stderr* is set."""
    kind = item.get("type", "message")
    if kind == "function_call":
        secho(f"call {item['name']} {item['arguments']}", fg="cyan", err=to_stderr)
    elif kind == "function_call_output":
        secho(f"output {extract_text(item['output'])}", fg="yellow", err=to_stderr)
    elif kind == "reasoning":
        secho("".join(extract_text(part.get("text")) for part in item.get("summary", [])), dim=True, err=to_stderr)
    else:
        secho(f"{item.get('role', '')}: ", bold=True, nl=False, err=to_stderr)
        echo(extract_text(item.get("content")), err=to_stderr)
