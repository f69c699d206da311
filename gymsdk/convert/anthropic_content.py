"""Blocks: what Messages has for the items of Responses, there and back.

A text, a call and a result are one block each; reasoning is a thinking block for each of its texts. On the way back
the ids of replies and calls are new, a reply's parts and a refusal are one text, annotations are gone, and so are
items that neither say nor call anything. Everything else survives, token ids included, as long as a client sends
back the blocks as it got them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from gymsdk import jsonl, responses
from gymsdk.convert import api
from gymsdk.convert.api import InvalidRequest
from gymsdk.convert.tokens import CARRIED_FIELDS
from gymsdk.types import Content, Item, extract_text

ERROR_PREFIX = "Error: "
"""What stands before the result of a tool that failed, for no other API has a place for that."""


def parse_parts(content: Any, where: str) -> list[Item]:
    """Give the parts that *content*, a string or a list of blocks, amounts to."""
    if isinstance(content, str):
        return [_text(content)]
    blocks = api.check_objects(content, where)
    return [each for number, block in enumerate(blocks) for each in parse_part(block, f"{where}.{number}")]


def parse_part(block: Item, where: str) -> Iterator[Item]:
    """The parts that one *block* amounts to: one, but for a document."""
    kind = block.get("type")
    if kind == "text":
        yield _text(api.get_text(block, "text", where))
    elif kind == "image":
        yield _image(api.get_object(block, "source", where), f"{where}.source")
    elif kind == "document":
        yield from _document(block, where)
    else:
        raise InvalidRequest(
            f"{where}: a block of type {kind!r} cannot be shown to the model; give it as text", param=where
        )


def parse_tool_result(block: Item, where: str) -> Item:
    """Give a `tool_result` *block* as an item: a string where it is no more than one text."""
    output = _plain(parse_parts(block.get("content") or "", f"{where}.content"))
    if block.get("is_error"):
        output = _marked(output)
    return {"type": "function_call_output", "call_id": api.get_text(block, "tool_use_id", where), "output": output}


def _plain(shown: list[Item]) -> Content:
    if not shown:
        return ""
    if len(shown) == 1 and shown[0]["type"] == "input_text":
        text: str = shown[0]["text"]
        return text
    return shown


def _marked(output: Content) -> Content:
    """Give *output* so that a model sees that it is an error."""
    if not isinstance(output, str):
        return [_text(ERROR_PREFIX), *output]
    return output if output.lower().startswith("error") else ERROR_PREFIX + output


def _text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _image(source: Item, where: str) -> Item:
    if source.get("type") == "url":
        url = api.get_text(source, "url", where)
    elif source.get("type") == "base64":
        url = f"data:{api.get_text(source, 'media_type', where)};base64,{api.get_text(source, 'data', where)}"
    else:
        sentence = f"{where}: an image of type {source.get('type')!r} is not within reach; give it as base64 or as url"
        raise InvalidRequest(sentence, param=where)
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _document(block: Item, where: str) -> Iterator[Item]:
    source = api.get_object(block, "source", where)
    yield from (_text(block[key]) for key in ("title", "context") if isinstance(block.get(key), str))
    if source.get("type") == "text":
        yield _text(api.get_text(source, "data", f"{where}.source"))
    elif source.get("type") == "content":
        yield from parse_parts(source.get("content"), f"{where}.source.content")
    else:
        what = source.get("media_type") or source.get("type")
        sentence = f"{where}: a document of type {what!r} cannot be read here; give its text, or its pages as images"
        raise InvalidRequest(sentence, param=f"{where}.source")


UNPARSED_ARGUMENTS_KEY = "_arguments"
"""The one key of the input of a call whose arguments are no JSON object: they are its value, verbatim."""

VERBATIM_ARGUMENTS_KEY = "arguments"
"""The key of ours beside an input that, written as JSON, would not be the text that the model wrote."""

# Clients whose numbers are all floats change one that is as long.
_LONG = re.compile(r"\d{16}")


def build_tool_use(call: Item) -> Item:
    """Give a function *call* as a block."""
    told: Item = {"type": "tool_use", "id": call["call_id"], "name": call["name"]}
    arguments = call["arguments"]
    read = _read(arguments)
    if read is None or read.keys() == {UNPARSED_ARGUMENTS_KEY}:
        return told | {"input": {UNPARSED_ARGUMENTS_KEY: arguments}}
    same = _written(read) == arguments and not _LONG.search(arguments)
    return told | {"input": read} | ({} if same else {VERBATIM_ARGUMENTS_KEY: arguments})


def parse_tool_use(block: Item, where: str) -> Item:
    """Give a `tool_use` *block* as a function call, its arguments as the model wrote them where the block tells."""
    arguments = _arguments(api.get_object(block, "input", where), block.get(VERBATIM_ARGUMENTS_KEY))
    return responses.build_function_call(
        api.get_text(block, "name", where), arguments, api.get_text(block, "id", where)
    )


def _arguments(given: Item, verbatim: object) -> str:
    unreadable = given.get(UNPARSED_ARGUMENTS_KEY)
    if len(given) == 1 and isinstance(unreadable, str):
        return unreadable
    # A client may have changed the input since.
    if isinstance(verbatim, str) and given in (_read(verbatim), _read(verbatim, float)):
        return verbatim
    return json.dumps(given, ensure_ascii=False)


def _read(arguments: str, whole: Callable[[str], float] = int) -> Item | None:
    """The object that *arguments* are, empty where they are, `None` where they are none that every client reads."""
    try:
        value = json.loads(arguments or "{}", parse_int=whole)
        # Half a surrogate pair is what the SDK cannot read in a stream.
        _written(value).encode()
    except (ValueError, OverflowError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _written(value: Item) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


SUMMARY, CONTENT = "summary", "content"
"""Where a reasoning item has its texts: servers are divided over it."""

REASONING_PART_TYPES = {SUMMARY: "summary_text", CONTENT: "reasoning_text"}


def build_thinking_blocks(item: Item) -> list[Item]:
    """Give a thinking block for each text of a reasoning *item*, or one redacted block where it has none."""
    shown = CONTENT if item.get(CONTENT) and not item.get(SUMMARY) else SUMMARY
    texts = item.get(shown) or []
    signature = _signature(item, shown)
    if not texts:
        return [{"type": "redacted_thinking", "data": signature}]
    if isinstance(texts, str):
        texts = [{"text": texts}]
    return [{"type": "thinking", "thinking": part.get("text") or "", "signature": signature} for part in texts]


def parse_thinking_blocks(thinking: list[Item], where: str) -> Item | None:
    """Give the reasoning item that blocks of one signature amount to, `None` where nobody here could read it."""
    if thinking[0]["type"] == "redacted_thinking":
        kept = _kept(thinking[0].get("data"))
        # What somebody else has encrypted says nothing to the model behind us.
        return None if kept is None else {"type": "reasoning", SUMMARY: []} | kept
    texts = [api.get_text(block, "thinking", where) for block in thinking]
    kept = _kept(thinking[0].get("signature"))
    if kept is None:
        return responses.build_reasoning(*texts)
    shown = CONTENT if SUMMARY in kept else SUMMARY
    return (
        {"type": "reasoning"} | kept | {shown: [{"type": REASONING_PART_TYPES[shown], "text": text} for text in texts]}
    )


def _signature(item: Item, shown: str) -> str:
    """Everything else that *item* holds; a summary in it says that the texts are those of the content."""
    kept = {key: value for key, value in item.items() if key not in {"type", shown, *CARRIED_FIELDS}}
    if "id" not in kept:
        kept["id"] = responses.generate_id("rs")
    if shown == CONTENT:
        kept.setdefault(SUMMARY, [])
    return jsonl.dump_json(kept).decode()


def _kept(signature: Any) -> Item | None:
    """What a *signature* of ours holds."""
    if not isinstance(signature, str) or not signature.startswith("{"):
        return None
    try:
        kept = jsonl.parse_json(signature.encode())
    except ValueError:
        return None
    return kept if isinstance(kept, dict) and isinstance(kept.get("id"), str) else None


THINKING_TYPES = ("thinking", "redacted_thinking")


def build_blocks(output: list[Item]) -> list[Item]:
    """Give the blocks that say what the items of an *output* say; an item's tokens are on its last block."""
    said: list[Item] = []
    for item in output:
        if told := _TOLD.get(item.get("type", "message")):
            said += told(item)
            said[-1] |= {key: item[key] for key in CARRIED_FIELDS if key in item}
    return said


def parse_message(message: Item, where: str) -> Iterator[Item]:
    """The items that a *message* at *where* amounts to, in the order of its blocks."""
    role, content = message.get("role"), message.get("content")
    read = _READ.get(role) if isinstance(role, str) else None
    if read is None:
        raise InvalidRequest(
            f"{where}.role must be 'user', 'assistant' or 'system', not {role!r}", param=f"{where}.role"
        )
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    yield from read(api.check_objects(given, f"{where}.content"), f"{where}.content")


def _reply(item: Item) -> list[Item]:
    content = item.get("content")
    refused = "" if isinstance(content, str) else "".join(part.get("refusal") or "" for part in content or [])
    return [{"type": "text", "text": extract_text(content) + refused}]


_TOLD: dict[str, Callable[[Item], list[Item]]] = {
    "message": _reply,
    "reasoning": build_thinking_blocks,
    "function_call": lambda item: [build_tool_use(item)],
}


def _shown(blocks: list[Item], where: str) -> Iterator[Item]:
    """What a user says: results of tools are items of their own, what stands between them is one message."""
    for results, group in groupby(enumerate(blocks), lambda each: each[1].get("type") == "tool_result"):
        run = [(f"{where}.{number}", block) for number, block in group]
        if results:
            yield from (parse_tool_result(block, place) for place, block in run)
        else:
            yield {"role": "user", "content": [part for place, block in run for part in parse_part(block, place)]}


def _told(blocks: list[Item], where: str) -> Iterator[Item]:
    """What the system says, in the middle of it all."""
    yield {"role": "system", "content": parse_parts(blocks, where)}


def _spoken(blocks: list[Item], where: str) -> Iterator[Item]:
    """What the assistant said: neighbours of one signature are one thought."""
    for _, group in groupby(enumerate(blocks), _thought):
        run = list(group)
        place, said = f"{where}.{run[0][0]}", [block for _, block in run]
        item = parse_thinking_blocks(said, place) if said[0].get("type") in THINKING_TYPES else _item(said[0], place)
        if item is not None:
            yield item | {key: said[-1][key] for key in CARRIED_FIELDS if said[-1].get(key) is not None}


def _thought(numbered: tuple[int, Item]) -> object:
    """What a block shares with those that are one item with it: its signature, if not its own number."""
    number, block = numbered
    return block.get("signature") or "" if block.get("type") == "thinking" else number


def _item(block: Item, where: str) -> Item:
    kind = block.get("type")
    if kind == "text":
        return responses.build_message(api.get_text(block, "text", where))
    if kind == "tool_use":
        return parse_tool_use(block, where)
    sentence = f"{where}: an assistant's block of type {kind!r} is nothing that a model behind this server has said"
    raise InvalidRequest(f"{sentence}; leave it out, or give it as text", param=where)


_READ: dict[str, Callable[[list[Item], str], Iterator[Item]]] = {"assistant": _spoken, "system": _told, "user": _shown}
