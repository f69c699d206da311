"""Read the outputs of tool calls from a transcript, by call id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gymsdk import ToolCall, Transcript


def outputs(transcript: Transcript) -> dict[str, str]:
    """Return the first output of each call, by call id.

    This function reads the transcript once. `Transcript.output` would read it once per call.
    """
    found: dict[str, str] = {}
    for item in transcript.items:
        call_id = item.get("call_id")
        if item.get("type") == "function_call_output" and isinstance(call_id, str) and call_id not in found:
            found[call_id] = Transcript(items=[item]).output(call_id) or ""
    return found


def parsed(texts: Mapping[str, str], call: ToolCall) -> Any:
    """Return the output of *call* as a JSON value, or `None` if there is no output or it is not JSON."""
    try:
        return json.loads(texts.get(call.call_id, ""))
    except (ValueError, RecursionError):
        return None
