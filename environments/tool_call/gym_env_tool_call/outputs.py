"""The outputs of a transcript: what its calls were answered, by the call's id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gymsdk import ToolCall, Transcript


def outputs(transcript: Transcript) -> dict[str, str]:
    """Give the text that first answered each call; one pass, where `Transcript.output` takes one for every call."""
    found: dict[str, str] = {}
    for item in transcript.items:
        call_id = item.get("call_id")
        if item.get("type") == "function_call_output" and isinstance(call_id, str) and call_id not in found:
            found[call_id] = Transcript(items=[item]).output(call_id) or ""
    return found


def parsed(texts: Mapping[str, str], call: ToolCall) -> Any:
    """Give the JSON value that answered *call*, `None` where nothing did or it is not JSON."""
    try:
        return json.loads(texts.get(call.call_id, ""))
    except (ValueError, RecursionError):
        return None
