"""Content: the parts of a message in the words of Responses and of Chat Completions, and the thoughts in a text."""

from __future__ import annotations

from gymsdk.errors import Failed
from gymsdk.transcript import Content, Item

OPENING, CLOSING = "<think>", "</think>"
"""What reasoning models put around their thoughts."""


def to_chat(content: Content | None) -> Content:
    """Give *content* for a chat message: a string where it is no more than one text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_chat_part(part) for part in content]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def from_chat(content: Content | None, *, written: bool = False) -> Content:
    """Give the *content* of a chat message for an item: one the policy has *written*, or one it was given."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_item_part(part, "output_text" if written else "input_text") for part in content]


def _chat_part(part: Item) -> Item:
    kind = part.get("type")
    if kind in {"input_text", "output_text", "text"}:
        return {"type": "text", "text": part.get("text", "")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal", "")}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"}}
    if kind == "input_video" and part.get("video_url"):
        return {"type": "video_url", "video_url": {"url": part["video_url"]}}
    if kind in {"input_audio", "image_url", "video_url", "audio_url"}:
        return part
    raise untranslatable(f"a content part of type {kind!r}")


def _item_part(part: Item, text_type: str) -> Item:
    kind = part.get("type")
    if kind == "text":
        return {"type": text_type, "text": part.get("text", "")}
    if kind == "image_url":
        image = part.get("image_url")
        given = image if isinstance(image, dict) else {"url": image}
        return {"type": "input_image", "image_url": given.get("url"), "detail": given.get("detail") or "auto"}
    return part


def thoughts(text: str) -> tuple[list[str], str]:
    """Give the `<think>` blocks in *text*, and what is left of it."""
    opened = text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return [], text
    # A template may have written the opening tag into the prompt, and an answer cut short lacks the closing one.
    if "<think>" not in text.partition("</think>")[0]:
        text = f"<think>{text}"
    if opened and "</think>" not in text:
        text = f"{text}</think>"
    blocks, rest = _blocks(text)
    return [thought for block in blocks if (thought := block.strip())], rest.lstrip()


def _blocks(text: str) -> tuple[list[str], str]:
    """Give what stands between `<think>` and the next `</think>`, and the rest: by `find`, which never goes back."""
    blocks, rest, here = [], [], 0
    while (start := text.find(OPENING, here)) >= 0 and (end := text.find(CLOSING, start)) >= 0:
        rest.append(text[here:start])
        blocks.append(text[start + len(OPENING) : end])
        here = end + len(CLOSING)
    return blocks, "".join(rest) + text[here:]


def tagged(thought: str, text: str) -> str:
    """Give *text* with the *thought* before it, as reasoning models write it."""
    return f"<think>\n{thought}\n</think>\n\n{text}" if thought else text


def untranslatable(what: str) -> Failed:
    """The failure to say *what* in a Chat Completions request."""
    message = f"{what} has no place in a Chat Completions request; use a model with api='responses'"
    return Failed(message, kind="model_bad_request")
