"""Wishes: what a body of Messages asks for beside its messages, in the words of Responses."""

from __future__ import annotations

import re
from typing import Any

from gymsdk.transcript import Item

from . import shape, shown
from .face import Malformed

BUDGETS = ((16_384, "high"), (4_096, "medium"), (0, "low"))
"""From how many tokens to think on which effort is asked for."""

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Efforts in the words that every engine knows."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# Claude Code opens its instructions with a line that differs in each request: sent on, it would keep every engine
# from finding the rest of the prompt in its cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def instructions(system: Any) -> str | None:
    """Give the *system* prompt as one text, `None` where it is empty."""
    if system is None:
        return None
    texts = [shape.text(part, "text", "system") for part in shown.parts(system, "system")]
    said = [text for each in texts if (text := _BILLING.sub("", each))]
    return "\n\n".join(said) or None


def tools(offered: Any) -> list[Item] | None:
    """Give the tools *offered*, `None` where there are none; a server's own tool is refused: nobody here runs it."""
    return [_tool(tool, f"tools.{number}") for number, tool in enumerate(shape.objects(offered or [], "tools"))] or None


def choice(body: Item) -> Item:
    """Give which tool the model may or must call, and whether several at once."""
    wish = shape.object_(body, "tool_choice")
    if not wish:
        return {}
    alone = {"parallel_tool_calls": False} if wish.get("disable_parallel_tool_use") else {}
    kind = wish.get("type")
    if kind == "tool":
        return alone | {"tool_choice": {"type": "function", "name": shape.text(wish, "name", "tool_choice")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise shape.wrong("tool_choice.type", "'auto', 'any', 'tool' or 'none'")
    return alone | {"tool_choice": CHOICES[kind]}


def reasoning(body: Item) -> Item | None:
    """Give how hard the model shall think, `None` where it is left to it.

    An effort comes before a budget. Thinking that is disabled asks for nothing, for few engines can be asked for none.
    """
    effort = shape.object_(body, "output_config").get("effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise shape.wrong("output_config.effort", "'low', 'medium', 'high', 'xhigh' or 'max'")
        return {"effort": EFFORTS[effort]}
    thinking = shape.object_(body, "thinking")
    budget = thinking.get("budget_tokens")
    if thinking.get("type") != "enabled" or budget is None:
        return None
    if not isinstance(budget, int):
        raise shape.wrong("thinking.budget_tokens", "a whole number")
    return {"effort": next((effort for least, effort in BUDGETS if budget >= least), "low")}


def text(body: Item) -> Item | None:
    """Give the form that the answer shall have, `None` where that is any."""
    config = shape.object_(body, "output_config")
    newer, older = shape.object_(config, "format", "output_config"), shape.object_(body, "output_format")
    form, where = newer or older, "output_config.format" if newer else "output_format"
    if not form:
        return None
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise shape.wrong(where, "an object with type 'json_schema' and a schema")
    return {"format": {"type": "json_schema", "name": "answer", "schema": form["schema"], "strict": True}}


def _tool(tool: Item, where: str) -> Item:
    name = shape.text(tool, "name", where)
    kind = tool.get("type") or "custom"
    if not isinstance(tool.get("input_schema"), dict):
        if kind != "custom":
            sentence = f"{where}: nobody behind this server runs the tool {kind!r}"
            advice = "offer one of your own, with a name and an input_schema"
            raise Malformed(f"{sentence}; {advice}", param=where)
        raise shape.wrong(f"{where}.input_schema", "an object")
    told = {"type": "function", "name": name, "parameters": tool["input_schema"], "strict": bool(tool.get("strict"))}
    return told | ({"description": tool["description"]} if tool.get("description") is not None else {})
