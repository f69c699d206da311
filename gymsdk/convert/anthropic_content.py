"""Convert between the items of Responses and the content blocks of Anthropic's Messages.

A text, a call and a tool result are one block each. Reasoning is one thinking block for each of its texts; the
signature of the block carries the rest of the reasoning item. If a client sends the blocks back unchanged, everything
survives the round trip, token ids included, with these exceptions: replies and calls get new ids, the parts of a reply
and a refusal become one text, and annotations and empty items are dropped.
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
from gymsdk.convert.arguments import UNPARSED_ARGUMENTS_KEY, dump_arguments, parse_arguments
from gymsdk.convert.tokens import CARRIED_FIELDS
from gymsdk.types import Content, Item, extract_text

THINKING_TYPES = ("thinking", "redacted_thinking")

SUMMARY, CONTENT = "summary", "content"
"""The two fields of a reasoning item that may hold its texts; servers differ."""

REASONING_PART_TYPES = {SUMMARY: "summary_text", CONTENT: "reasoning_text"}

ERROR_PREFIX = "Error: "
"""The prefix of the output of a tool that failed; no other API has a field for failure."""

VERBATIM_ARGUMENTS_KEY = "arguments"
"""A key of a `tool_use` block, not part of Messages, with the text of arguments that JSON would write differently."""

# Clients that parse all numbers as floats change longer ones.
_LONG_NUMBER = re.compile(r"\d{16}")


def build_blocks(output: list[Item]) -> list[Item]:
    """Return the blocks for the items of an *output*. The last block of an item has its token fields."""
    blocks: list[Item] = []
    for item in output:
        if build := _BLOCK_BUILDERS.get(item.get("type", "message")):
            blocks += build(item)
            blocks[-1] |= {key: item[key] for key in CARRIED_FIELDS if key in item}
    return blocks


def parse_message(message: Item, where: str) -> Iterator[Item]:
    """Yield the items for a *message* of a request, in the order of its blocks; *where* is its path in the request.

    Raises:
        InvalidRequest: The role or a block is invalid or not supported.
    """
    role, content = message.get("role"), message.get("content")
    parse = _ROLE_PARSERS.get(role) if isinstance(role, str) else None
    if parse is None:
        raise InvalidRequest(
            f"{where}.role must be 'user', 'assistant' or 'system', not {role!r}", param=f"{where}.role"
        )
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    yield from parse(api.check_objects(blocks, f"{where}.content"), f"{where}.content")


def parse_parts(content: Any, where: str) -> list[Item]:
    """Return the content parts for *content*, a string or a list of blocks."""
    if isinstance(content, str):
        return [_build_text_part(content)]
    blocks = api.check_objects(content, where)
    return [part for number, block in enumerate(blocks) for part in parse_part(block, f"{where}.{number}")]


def parse_part(block: Item, where: str) -> Iterator[Item]:
    """Yield the content parts for one *block*: several for a document, else one."""
    kind = block.get("type")
    if kind == "text":
        yield _build_text_part(api.get_text(block, "text", where))
    elif kind == "image":
        yield _parse_image(api.get_object(block, "source", where), f"{where}.source")
    elif kind == "document":
        yield from _parse_document(block, where)
    else:
        raise InvalidRequest(
            f"{where}: a block of type {kind!r} cannot be sent to the model; send it as text", param=where
        )


def parse_tool_result(block: Item, where: str) -> Item:
    """Return the item for a `tool_result` *block*; a single text becomes a string."""
    parts = parse_parts(block.get("content") or "", f"{where}.content")
    output: Content = parts or ""
    if len(parts) == 1 and parts[0]["type"] == "input_text":
        output = parts[0]["text"]
    if block.get("is_error"):
        output = _mark_as_error(output)
    return {"type": "function_call_output", "call_id": api.get_text(block, "tool_use_id", where), "output": output}


def build_tool_use(call: Item) -> Item:
    """Return the `tool_use` block for a function *call*."""
    block: Item = {"type": "tool_use", "id": call["call_id"], "name": call["name"]}
    arguments = call["arguments"]
    parsed = parse_arguments(arguments)
    if parsed is None or parsed.keys() == {UNPARSED_ARGUMENTS_KEY}:
        return block | {"input": {UNPARSED_ARGUMENTS_KEY: arguments}}
    is_reproducible = dump_arguments(parsed) == arguments and not _LONG_NUMBER.search(arguments)
    return block | {"input": parsed} | ({} if is_reproducible else {VERBATIM_ARGUMENTS_KEY: arguments})


def parse_tool_use(block: Item, where: str) -> Item:
    """Return the function call for a `tool_use` *block*, with the arguments as the model wrote them if possible."""
    arguments = _recover_arguments(api.get_object(block, "input", where), block.get(VERBATIM_ARGUMENTS_KEY))
    return responses.build_function_call(
        api.get_text(block, "name", where), arguments, api.get_text(block, "id", where)
    )


def build_thinking_blocks(item: Item) -> list[Item]:
    """Return a thinking block for each text of a reasoning *item*, or one redacted block if it has no text."""
    key = CONTENT if item.get(CONTENT) and not item.get(SUMMARY) else SUMMARY
    texts = item.get(key) or []
    signature = _build_signature(item, key)
    if not texts:
        return [{"type": "redacted_thinking", "data": signature}]
    if isinstance(texts, str):
        texts = [{"text": texts}]
    return [{"type": "thinking", "thinking": part.get("text") or "", "signature": signature} for part in texts]


def parse_thinking_blocks(blocks: list[Item], where: str) -> Item | None:
    """Return the reasoning item for *blocks* with one signature, `None` for a redacted block from another server."""
    if blocks[0]["type"] == "redacted_thinking":
        fields = _parse_signature(blocks[0].get("data"))
        return None if fields is None else {"type": "reasoning", SUMMARY: []} | fields
    texts = [api.get_text(block, "thinking", where) for block in blocks]
    fields = _parse_signature(blocks[0].get("signature"))
    if fields is None:
        return responses.build_reasoning(*texts)
    key = CONTENT if SUMMARY in fields else SUMMARY
    return {"type": "reasoning"} | fields | {key: [{"type": REASONING_PART_TYPES[key], "text": text} for text in texts]}


def _build_reply(item: Item) -> list[Item]:
    content = item.get("content")
    refusal = "" if isinstance(content, str) else "".join(part.get("refusal") or "" for part in content or [])
    return [{"type": "text", "text": extract_text(content) + refusal}]


_BLOCK_BUILDERS: dict[str, Callable[[Item], list[Item]]] = {
    "message": _build_reply,
    "reasoning": build_thinking_blocks,
    "function_call": lambda item: [build_tool_use(item)],
}


def _parse_user_blocks(blocks: list[Item], where: str) -> Iterator[Item]:
    """Yield an item for each tool result, and one message for the blocks between tool results."""
    for are_results, group in groupby(enumerate(blocks), lambda numbered: numbered[1].get("type") == "tool_result"):
        run = [(f"{where}.{number}", block) for number, block in group]
        if are_results:
            yield from (parse_tool_result(block, path) for path, block in run)
        else:
            yield {"role": "user", "content": [part for path, block in run for part in parse_part(block, path)]}


def _parse_system_blocks(blocks: list[Item], where: str) -> Iterator[Item]:
    yield {"role": "system", "content": parse_parts(blocks, where)}


def _parse_assistant_blocks(blocks: list[Item], where: str) -> Iterator[Item]:
    """Yield an item for each block, and one for adjacent thinking blocks with the same signature."""
    for _, group in groupby(enumerate(blocks), _get_item_key):
        run = list(group)
        path, same_item = f"{where}.{run[0][0]}", [block for _, block in run]
        is_thinking = same_item[0].get("type") in THINKING_TYPES
        item = parse_thinking_blocks(same_item, path) if is_thinking else _parse_assistant_block(same_item[0], path)
        if item is not None:
            last = same_item[-1]
            yield item | {key: last[key] for key in CARRIED_FIELDS if last.get(key) is not None}


def _get_item_key(numbered: tuple[int, Item]) -> object:
    """Return a key that blocks of one item share: the signature of thinking blocks, else the block's number."""
    number, block = numbered
    return block.get("signature") or "" if block.get("type") == "thinking" else number


def _parse_assistant_block(block: Item, where: str) -> Item:
    kind = block.get("type")
    if kind == "text":
        return responses.build_message(api.get_text(block, "text", where))
    if kind == "tool_use":
        return parse_tool_use(block, where)
    raise InvalidRequest(
        f"{where}: this server does not support a block of type {kind!r} in an assistant message; leave it out, or"
        " send it as text",
        param=where,
    )


_ROLE_PARSERS: dict[str, Callable[[list[Item], str], Iterator[Item]]] = {
    "assistant": _parse_assistant_blocks,
    "system": _parse_system_blocks,
    "user": _parse_user_blocks,
}


def _mark_as_error(output: Content) -> Content:
    if not isinstance(output, str):
        return [_build_text_part(ERROR_PREFIX), *output]
    return output if output.lower().startswith("error") else ERROR_PREFIX + output


def _build_text_part(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _parse_image(source: Item, where: str) -> Item:
    if source.get("type") == "url":
        url = api.get_text(source, "url", where)
    elif source.get("type") == "base64":
        url = f"data:{api.get_text(source, 'media_type', where)};base64,{api.get_text(source, 'data', where)}"
    else:
        raise InvalidRequest(
            f"{where}: an image of type {source.get('type')!r} is not supported; send it as base64 or as url",
            param=where,
        )
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _parse_document(block: Item, where: str) -> Iterator[Item]:
    source = api.get_object(block, "source", where)
    yield from (_build_text_part(block[key]) for key in ("title", "context") if isinstance(block.get(key), str))
    if source.get("type") == "text":
        yield _build_text_part(api.get_text(source, "data", f"{where}.source"))
    elif source.get("type") == "content":
        yield from parse_parts(source.get("content"), f"{where}.source.content")
    else:
        kind = source.get("media_type") or source.get("type")
        raise InvalidRequest(
            f"{where}: a document of type {kind!r} is not supported; send its text, or its pages as images",
            param=f"{where}.source",
        )


def _build_signature(item: Item, key: str) -> str:
    """Return all fields of *item* except its texts under *key* as JSON; a `summary` in it means that key is content."""
    fields = {name: value for name, value in item.items() if name not in {"type", key, *CARRIED_FIELDS}}
    if "id" not in fields:
        fields["id"] = responses.generate_id("rs")
    if key == CONTENT:
        fields.setdefault(SUMMARY, [])
    return jsonl.dump_json(fields).decode()


def _parse_signature(signature: Any) -> Item | None:
    """Return the fields in a *signature* of `_build_signature`, `None` for any other."""
    if not isinstance(signature, str) or not signature.startswith("{"):
        return None
    try:
        fields = jsonl.parse_json(signature.encode())
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("id"), str) else None


def _recover_arguments(arguments: Item, verbatim: object) -> str:
    unparsed = arguments.get(UNPARSED_ARGUMENTS_KEY)
    if len(arguments) == 1 and isinstance(unparsed, str):
        return unparsed
    # The client may have changed the input.
    if isinstance(verbatim, str) and arguments in (parse_arguments(verbatim), parse_arguments(verbatim, float)):
        return verbatim
    return json.dumps(arguments, ensure_ascii=False)
