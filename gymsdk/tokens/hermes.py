"""The Hermes form: tools offered, called and answered as JSON between tags."""

from __future__ import annotations

import json
from collections.abc import Iterable

from gymsdk.transcript import Item

from .marks import plain

OUTPUT = ("<tool_response>", "</tool_response>")
"""The tags around the output of a tool."""


def offer(tools: Iterable[Item]) -> str:
    """Give the words of the system that offer *tools*, in the shape of OpenAI's chat."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        f"These functions are at your service, each described by its JSON Schema:\n<tools>\n{listed}\n</tools>\n\n"
        "To call one, write its name and its arguments as a JSON object between tags; for several calls, several:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
    )


def call(function: Item) -> str:
    """Give a call as a policy writes it; *function* has a name, and arguments as JSON text or as an object."""
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'


def response(output: str) -> str:
    """Give the *output* of a tool as a policy reads it."""
    return f"{OUTPUT[0]}\n{untagged(output)}\n{OUTPUT[1]}"


def untagged(words: str) -> str:
    """Give *words* that cannot be taken for the output of a tool, nor end one."""
    return plain(words, OUTPUT)
