"""Misfits: servers whose answers show that they were started, or are asked, in a way that cannot work."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from gymsdk.errors import Failed
from gymsdk.transcript import Item, is_reply, text_of

FLAGS = "--enable-auto-tool-choice --tool-call-parser hermes"
"""How vLLM is told to read the tool calls of most models; others have a parser of their own."""

OPENED, CLOSED = "<tool_call>", "</tool_call>"

# The words of vLLM, SGLang, llama.cpp (of today and before it had tools) and Ollama.
_MENDED = (
    (r"requires --enable-auto-tool-choice|requires --tool-call-parser", f"start vLLM with {FLAGS}"),
    (r"Unsupported tool_call_parser: None", "start SGLang with --tool-call-parser qwen25, or the parser of the model"),
    (r"tools param requires --jinja|Unsupported param: tools\b", "start llama-server with --jinja"),
    (
        r"does not support tools\b",
        "serve a model whose template knows tools (`ollama show NAME` lists its capabilities)",
    ),
)
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def mend(text: str) -> str | None:
    """Give how to mend a server that refuses tools in *text*; `None` where it says nothing of the kind."""
    return next((advice for words, advice in _MENDED if re.search(words, text, re.IGNORECASE)), None)


def check(response: Item, request: Item, *, host: str) -> None:
    """Raise `Failed` where the text of a *response* holds tool calls that *host* should have read.

    A malformed call is the policy's own doing, and so is one of a tool that was not offered: they are text.
    """
    offered = {tool.get("name") for tool in request.get("tools") or [] if isinstance(tool, dict)}
    if not offered or request.get("tool_choice") == "none" or response.get("status") == "incomplete":
        return
    output = response["output"]
    if any(item.get("type") == "function_call" for item in output):
        return
    text = "".join(text_of(item.get("content")) for item in output if is_reply(item))
    if OPENED in text and _left(_CODE.sub("", text), offered):
        message = f"{host} leaves tool calls in the text, as in {text[:120]!r}; start vLLM with {FLAGS}"
        raise Failed(f"{message}, or the parser of the model", kind="model_misconfigured")


def _left(text: str, offered: Collection[object]) -> bool:
    """Whether *text* holds tool calls, and all of them are sound: of a bad one among them a parser leaves all."""
    calls = list(_calls(text))
    return bool(calls) and all(_is_sound(call, offered) for call in calls)


def _calls(text: str) -> Iterator[str]:
    """What stands in each call of *text*; nothing in one that is not closed."""
    here = 0
    while (start := text.find(OPENED, here)) >= 0:
        end = text.find(CLOSED, start)
        here = len(text) if end < 0 else end
        yield text[start + len(OPENED) : here] if end >= 0 else ""


def _is_sound(call: str, offered: Collection[object]) -> bool:
    try:
        parsed = json.loads(call)
    except (ValueError, RecursionError):
        return False
    if not isinstance(parsed, dict) or not isinstance(parsed.get("arguments"), dict):
        return False
    return isinstance(parsed.get("name"), str) and parsed["name"] in offered
