"""Own thoughts: what a hosted model is shown again of its reasoning, for it refuses what is not its own."""

from __future__ import annotations

from collections.abc import Iterable

from gymsdk.errors import Failed
from gymsdk.types import Content, Item

THINK_START, THINK_END = "<think>", "</think>"
"""What reasoning models put around their thoughts."""

FILE_FIELDS = ("file_data", "file_id", "filename")
"""What both APIs have of a file."""

TEXT_PART_TYPES = ("input_text", "output_text", "text", "refusal")
CHAT_PART_TYPES = ("input_audio", "image_url", "video_url", "audio_url")
"""Types of parts: those of texts, and those that are a chat's as they are."""


def to_chat_content(content: Content | None) -> Content:
    """Give *content* for a chat message: a string where it is no more than one text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_chat_part(part) for part in content]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def from_chat_content(content: Content | None, *, written: bool = False) -> Content:
    """Give the *content* of a chat message for an item: one the policy has *written*, or one it was given."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_item_part(part, "output_text" if written else "input_text") for part in content]


def _chat_part(part: Item) -> Item:
    kind = part.get("type")
    if kind in TEXT_PART_TYPES:
        return {"type": "text", "text": read_text(part.get("refusal" if kind == "refusal" else "text"))}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"}}
    if kind == "input_video" and part.get("video_url"):
        return {"type": "video_url", "video_url": {"url": part["video_url"]}}
    if kind == "input_audio" and part.get("audio_url"):
        return {"type": "audio_url", "audio_url": {"url": part["audio_url"]}}
    if kind == "input_file" and (part.get("file_data") or part.get("file_id")):
        return {"type": "file", "file": {key: part[key] for key in FILE_FIELDS if part.get(key) is not None}}
    if kind in CHAT_PART_TYPES:
        return part
    raise build_untranslatable_error(f"a content part of type {kind!r}")


def _item_part(part: Item, text_type: str) -> Item:
    kind = part.get("type")
    if kind == "text":
        return {"type": text_type, "text": part.get("text", "")}
    if kind == "image_url":
        image = part.get("image_url")
        given = image if isinstance(image, dict) else {"url": image}
        return {"type": "input_image", "image_url": given.get("url"), "detail": given.get("detail") or "auto"}
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part


def split_content(content: object) -> tuple[list[str], str]:
    """Give the thoughts and the text in the *content* of a chat answer, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return [], content or ""
    if not isinstance(content, list):
        raise TypeError("content is neither a text nor a list of parts")
    inner = [read_text(part.get("thinking")) for part in content if part.get("type") == "thinking"]
    said = "".join(read_text(part.get("text")) for part in content if part.get("type") != "thinking")
    return [thought for each in inner if (thought := each.strip())], said


def join_reasoning(items: Iterable[Item]) -> str:
    """Give the thoughts among *items* as one text; servers are divided over where an item has them."""
    told = (item.get("summary") or item.get("content") or [] for item in items if item.get("type") == "reasoning")
    return "\n".join(text for parts in told for part in parts if (text := read_text(part.get("text"))))


def read_text(value: object) -> str:
    """Give the text of *value*: a text itself, or a list of parts with texts; nothing of anything else."""
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return value if isinstance(value, str) else ""


def split_think_blocks(text: str, *, told: bool = False) -> tuple[list[str], str]:
    """Give the `<think>` blocks in *text*, and what is left of it.

    Where thoughts have been *told* beside it, or the tag is quoted, an end without a beginning is part of the text.
    """
    opened = text.lstrip().startswith(THINK_START)
    if not opened and (THINK_END not in text or told or text.partition(THINK_END)[0].endswith("`")):
        return [], text
    # A template may have written the opening tag into the prompt, and an answer cut short lacks the closing one.
    if THINK_START not in text.partition(THINK_END)[0]:
        text = f"{THINK_START}{text}"
    if opened and THINK_END not in text:
        text = f"{text}{THINK_END}"
    blocks, rest = _blocks(text)
    return [thought for block in blocks if (thought := block.strip())], rest.lstrip()


def _blocks(text: str) -> tuple[list[str], str]:
    """Give what stands between `<think>` and the next `</think>`, and the rest: by `find`, which never goes back."""
    blocks, rest, here = [], [], 0
    while (start := text.find(THINK_START, here)) >= 0 and (end := text.find(THINK_END, start)) >= 0:
        rest.append(text[here:start])
        blocks.append(text[start + len(THINK_START) : end])
        here = end + len(THINK_END)
    return blocks, "".join(rest) + text[here:]


def prepend_think_block(thought: str, text: str) -> str:
    """Give *text* with the *thought* before it, as reasoning models write it."""
    return f"{THINK_START}\n{thought}\n{THINK_END}\n\n{text}" if thought else text


def check_tool_choice(choice: object) -> None:
    """Raise `Failed` where the *choice* of a tool asks for a call, in a request that offers no tools."""
    if choice == "required" or isinstance(choice, dict):
        asks = "required" if choice == "required" else "one tool"
        message = f"tool_choice asks for a call ({asks}), and the request offers no tools; leave it out or send tools"
        raise Failed(message, kind="model_bad_request")


def build_untranslatable_error(what: str) -> Failed:
    """The failure to say *what* in a Chat Completions request."""
    message = (
        f"{what} has no place in a Chat Completions request, which is how the model's server is asked; leave it out,"
        " or have a server that speaks Responses asked so (--api responses)"
    )
    return Failed(message, kind="model_bad_request")
