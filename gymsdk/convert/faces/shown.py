"""What a model is shown: the blocks of text, images and documents as content parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymsdk.transcript import Content, Item

from . import shape
from .face import Malformed

ERROR = "Error: "
"""What stands before the result of a tool that failed, for no other API has a place for that."""


def parts(content: Any, where: str) -> list[Item]:
    """Give the parts that *content*, a string or a list of blocks, amounts to."""
    if isinstance(content, str):
        return [_text(content)]
    blocks = shape.objects(content, where)
    return [each for number, block in enumerate(blocks) for each in part(block, f"{where}.{number}")]


def part(block: Item, where: str) -> Iterator[Item]:
    """The parts that one *block* amounts to: one, but for a document."""
    kind = block.get("type")
    if kind == "text":
        yield _text(shape.text(block, "text", where))
    elif kind == "image":
        yield _image(shape.object_(block, "source", where), f"{where}.source")
    elif kind == "document":
        yield from _document(block, where)
    else:
        raise Malformed(f"{where}: a block of type {kind!r} cannot be shown to the model; give it as text", param=where)


def result(block: Item, where: str) -> Item:
    """Give a `tool_result` *block* as an item: a string where it is no more than one text."""
    output = _plain(parts(block.get("content") or "", f"{where}.content"))
    if block.get("is_error"):
        output = _marked(output)
    return {"type": "function_call_output", "call_id": shape.text(block, "tool_use_id", where), "output": output}


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
        return [_text(ERROR), *output]
    return output if output.lower().startswith("error") else ERROR + output


def _text(text: str) -> Item:
    return {"type": "input_text", "text": text}


def _image(source: Item, where: str) -> Item:
    if source.get("type") == "url":
        url = shape.text(source, "url", where)
    elif source.get("type") == "base64":
        url = f"data:{shape.text(source, 'media_type', where)};base64,{shape.text(source, 'data', where)}"
    else:
        sentence = f"{where}: an image of type {source.get('type')!r} is not within reach; give it as base64 or as url"
        raise Malformed(sentence, param=where)
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def _document(block: Item, where: str) -> Iterator[Item]:
    source = shape.object_(block, "source", where)
    yield from (_text(block[key]) for key in ("title", "context") if isinstance(block.get(key), str))
    if source.get("type") == "text":
        yield _text(shape.text(source, "data", f"{where}.source"))
    elif source.get("type") == "content":
        yield from parts(source.get("content"), f"{where}.source.content")
    else:
        what = source.get("media_type") or source.get("type")
        sentence = f"{where}: a document of type {what!r} cannot be read here; give its text, or its pages as images"
        raise Malformed(sentence, param=f"{where}.source")
