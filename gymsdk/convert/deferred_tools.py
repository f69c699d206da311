"""Tools that a client of Messages loads in the course of a conversation, as Claude Code does with its tool search.

The client marks such tools with `defer_loading`, and later refers to them by name in the output of a tool. The prompt
then does not list them: the output gives their definitions instead. So the beginning of the prompt stays the same, and
the policy sees a definition where the conversation loads it.
"""

from __future__ import annotations

from gymsdk.convert import api
from gymsdk.jsonl import dump_json
from gymsdk.types import Item

REFERENCE_TYPE = "tool_reference"


def load_deferred_tools(body: Item) -> Item:
    """Return the *body* of a Messages request without deferred tools, and with definitions in place of references.

    A deferred tool that `tool_choice` names stays.

    Raises:
        InvalidRequest: The tools, a message or a reference is malformed.
    """
    tools = api.check_objects(body.get("tools") or [], "tools")
    forced = (body.get("tool_choice") or {}).get("name") if isinstance(body.get("tool_choice"), dict) else None
    listed_tools = [tool for tool in tools if not tool.get("defer_loading") or tool.get("name") == forced]
    named = ((tool.get("name"), tool) for tool in tools)
    definitions = {name: _format_definition(tool) for name, tool in named if isinstance(name, str)}
    messages = [
        _replace_references(message, definitions, f"messages.{number}")
        for number, message in enumerate(api.check_objects(body.get("messages"), "messages"))
    ]
    return body | {"messages": messages} | ({"tools": listed_tools} if len(listed_tools) < len(tools) else {})


def _replace_references(message: Item, definitions: dict[str, str], where: str) -> Item:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_has_references, content)):
        return message
    blocks = [
        block | {"content": [_replace(part, definitions, f"{where}.content") for part in block["content"]]}
        if _has_references(block)
        else block
        for block in content
    ]
    return message | {"content": blocks}


def _has_references(block: object) -> bool:
    """Whether *block* is a tool result with a reference in its content."""
    parts = block.get("content") if isinstance(block, dict) else None
    return isinstance(parts, list) and any(map(_is_reference, parts))


def _is_reference(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == REFERENCE_TYPE


def _replace(part: Item, definitions: dict[str, str], where: str) -> Item:
    if not _is_reference(part):
        return part
    name = api.get_text(part, "tool_name", where)
    return {"type": "text", "text": definitions.get(name, name)}


def _format_definition(tool: Item) -> str:
    """Return the definition of *tool* as a line of JSON, in the form in which most chat templates list tools."""
    fields = {"name": "name", "description": "description", "parameters": "input_schema"}
    function = {name: tool[key] for name, key in fields.items() if tool.get(key) is not None}
    return dump_json({"type": "function", "function": function}).decode()
