"""Prompts: what a policy is shown, as messages of plain text that the tokenizer of bytes writes in ChatML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from gymsdk.convert import parts
from gymsdk.tokens import chatml
from gymsdk.tokens.bytes import Bytes
from gymsdk.tokens.chatml import Mark
from gymsdk.transcript import Item, is_reply, text_of
from gymsdk.turns import of_policy

BYTES = Bytes()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The *messages* of a chat, their content text, and the *tools* on offer."""

    messages: list[Item]
    tools: list[Item]

    def turn(self) -> int:
        """Give how many turns the policy has had in it."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def size(self) -> int:
        """Give how many ids it has."""
        pieces = chatml.pieces(self.messages, tools=self.tools, add_generation_prompt=True)
        return sum(1 if isinstance(piece, Mark) else size(piece) for piece in pieces)

    def ids(self, *, add_generation_prompt: bool = True) -> list[int]:
        """Give the ids, those after which the policy goes on the last where a *generation prompt* is added."""
        return BYTES.apply_chat_template(self.messages, tools=self.tools, add_generation_prompt=add_generation_prompt)


def of_chat(body: Item) -> Prompt:
    """Give the prompt of a chat *body*, its messages to the letter."""
    told = [message | {"content": _text(message.get("content"))} for message in body["messages"]]
    return Prompt(told, body.get("tools") or [])


def of_request(request: Item) -> Prompt:
    """Give the prompt of a Responses *request*."""
    given = request.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = request.get("instructions")
    lead = [{"role": "system", "content": instructions}] if instructions else []
    return Prompt([*lead, *_messages(items)], [_tool(tool) for tool in request.get("tools") or []])


def words(output: Iterable[Item], *, thoughts: bool = True) -> str:
    """Give what a policy writes that says its *output*, with its *thoughts* or without."""
    turn = _turn(item for item in output if thoughts or item.get("type") != "reasoning")
    return "".join(piece for piece in [*chatml.pieces([turn])][2:-2])


def size(text: str) -> int:
    """Give how many ids *text* has: one for each byte."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _messages(items: Iterable[Item]) -> Iterator[Item]:
    for by_policy, run in groupby(items, of_policy):
        if by_policy:
            yield _turn(run)
        else:
            yield from map(_message, run)


def _message(item: Item) -> Item:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        return {"role": "tool", "content": _text(item.get("output"))}
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"))}
    return {"role": "user", "content": f"[{kind}]"}


def _turn(items: Iterable[Item]) -> Item:
    turn = list(items)
    said = "".join(_text(item.get("content")) for item in turn if is_reply(item))
    calls = [{"function": item} for item in turn if item.get("type") == "function_call"]
    return {"role": "assistant", "content": said, "reasoning_content": parts.thought(turn), "tool_calls": calls}


def _tool(tool: Item) -> Item:
    return {"type": tool.get("type"), "function": {key: value for key, value in tool.items() if key != "type"}}


def _text(content: object) -> str:
    """The text of *content*; of what is no text in it, its type in brackets."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(text_of([part]) if "text" in part else f"[{part.get('type')}]" for part in content)
