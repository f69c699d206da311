"""What a policy takes: the requests that can be answered by who keeps nothing, runs no tools and reads messages."""

from __future__ import annotations

from gymsdk.convert.faces.face import Malformed
from gymsdk.transcript import Item

KEPT = ("previous_response_id", "conversation", "prompt")
"""What names something that a server has kept."""

READ = frozenset({"message", "reasoning", "function_call", "function_call_output"})
"""The types of items that a policy reads."""


def check(request: Item, *, where: str) -> None:
    """Raise `Malformed` where a Responses *request* asks for what no policy here has; what was said stood *where*."""
    if kept := next((key for key in KEPT if request.get(key) is not None), None):
        raise Malformed(f"this server keeps nothing that {kept!r} could name; send the whole conversation", kept)
    for number, tool in enumerate(request.get("tools") or []):
        if tool.get("type") != "function":
            sentence = f"tools[{number}]: nobody behind this server runs a tool of type {tool.get('type')!r}"
            raise Malformed(f"{sentence}; offer functions", "tools")
    items = request.get("input")
    if not items and not request.get("instructions"):
        raise Malformed(f"{where!r} is empty; say something in it", where)
    for number, item in enumerate(items if isinstance(items, list) else []):
        kind = item.get("type") or "message"
        if kind not in READ:
            sentence = f"input[{number}]: this server reads no item of type {kind!r}"
            raise Malformed(f"{sentence}; there are {', '.join(sorted(READ))}", f"input[{number}]")
