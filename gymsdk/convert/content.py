"""Convert content parts between Responses and Chat Completions, and separate reasoning from text."""

from __future__ import annotations

from collections.abc import Iterable

from gymsdk.errors import Failed
from gymsdk.responses import read_text
from gymsdk.types import Content, Item

THINK_START, THINK_END = "<think>", "</think>"
"""The tags that reasoning models write around their reasoning."""

FILE_FIELDS = ("file_data", "file_id", "filename")
"""The fields of a file in both APIs."""

TEXT_PART_TYPES = ("input_text", "output_text", "text", "refusal")
CHAT_PART_TYPES = ("input_audio", "image_url", "video_url", "audio_url")
"""The types of parts that already are parts of Chat Completions."""


def to_chat_content(content: Content | None) -> Content:
    """Convert the *content* of an item to the content of a chat message; a single text becomes a string.

    Raises:
        Failed: A part has no equivalent in Chat Completions.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_to_chat_part(part) for part in content]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def from_chat_content(content: Content | None, *, written: bool = False) -> Content:
    """Convert the *content* of a chat message to the content of an item.

    Args:
        content: The content of the message.
        written: Whether the policy wrote the message, so that its texts become `output_text` parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return [_from_chat_part(part, "output_text" if written else "input_text") for part in content]


def _to_chat_part(part: Item) -> Item:
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


def _from_chat_part(part: Item, text_type: str) -> Item:
    kind = part.get("type")
    if kind == "text":
        return {"type": text_type, "text": part.get("text", "")}
    if kind == "image_url":
        image = part.get("image_url")
        fields = image if isinstance(image, dict) else {"url": image}
        return {"type": "input_image", "image_url": fields.get("url"), "detail": fields.get("detail") or "auto"}
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part


def split_content(content: object) -> tuple[list[str], str]:
    """Return the reasoning texts and the text in the *content* of a chat completion, which may be a list of parts.

    Raises:
        TypeError: The content is neither a string nor a list.
    """
    if content is None or isinstance(content, str):
        return [], content or ""
    if not isinstance(content, list):
        raise TypeError("content is neither a string nor a list of parts")
    reasoning = [read_text(part.get("thinking")) for part in content if part.get("type") == "thinking"]
    text = "".join(read_text(part.get("text")) for part in content if part.get("type") != "thinking")
    return [stripped for text in reasoning if (stripped := text.strip())], text


def join_reasoning(items: Iterable[Item]) -> str | None:
    """Return the reasoning texts of *items* as one text, `None` if there are none.

    Servers put them under `summary` or under `content`. An empty text is a text: some engines want it back.
    """
    contents = (item.get("summary") or item.get("content") or [] for item in items if item.get("type") == "reasoning")
    texts = [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else [read_text(part.get("text")) for part in content])
    ]
    return "\n".join(filter(None, texts)) if texts else None


def split_think_blocks(text: str, *, separated: bool = False) -> tuple[list[str], str]:
    """Return the contents of the `<think>` blocks in *text*, and the rest of it.

    Args:
        text: The text of an answer.
        separated: Whether the server already returned the reasoning separately. A closing tag without an opening tag
            then belongs to the text, as does a closing tag in quotes.
    """
    starts_open = text.lstrip().startswith(THINK_START)
    if not starts_open and (THINK_END not in text or separated or text.partition(THINK_END)[0].endswith("`")):
        return [], text
    # The opening tag may be part of the prompt, and a truncated answer lacks the closing tag.
    if THINK_START not in text.partition(THINK_END)[0]:
        text = f"{THINK_START}{text}"
    if starts_open and THINK_END not in text:
        text = f"{text}{THINK_END}"
    blocks, rest = _find_think_blocks(text)
    return [stripped for block in blocks if (stripped := block.strip())], rest.lstrip()


def _find_think_blocks(text: str) -> tuple[list[str], str]:
    """Return the contents of the complete blocks and the rest; uses `find`, which takes linear time."""
    blocks, rest, position = [], [], 0
    while (start := text.find(THINK_START, position)) >= 0 and (end := text.find(THINK_END, start)) >= 0:
        rest.append(text[position:start])
        blocks.append(text[start + len(THINK_START) : end])
        position = end + len(THINK_END)
    return blocks, "".join(rest) + text[position:]


def prepend_think_block(reasoning: str | None, text: str) -> str:
    """Return *text* after a `<think>` block with the *reasoning*, as reasoning models write it."""
    return f"{THINK_START}\n{reasoning}\n{THINK_END}\n\n{text}" if reasoning else text


def check_tool_choice(choice: object) -> None:
    """Raise an error if the `tool_choice` of a request without tools demands a call.

    Raises:
        Failed: The *choice* is `required` or names a tool.
    """
    if choice == "required" or isinstance(choice, dict):
        demand = "required" if choice == "required" else "one tool"
        raise Failed(
            f"tool_choice demands a call ({demand}), but the request has no tools; leave tool_choice out or send tools",
            kind="model_bad_request",
        )


def build_untranslatable_error(what: str) -> Failed:
    """Return the error for a part of a request that Chat Completions cannot express."""
    return Failed(
        f"{what} cannot be sent in a Chat Completions request; leave it out, or use a server that supports the"
        " Responses API (--api responses)",
        kind="model_bad_request",
    )
