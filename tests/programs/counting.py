"""The configuration of a resources server that is a program, with a policy that counts to three, and rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

AGENT = "counter_simple_agent"
PARAMETERS = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}
PARAMS = {"input": "Count to three.", "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}]}


def write_counting(folder: Path, config: Path, entrypoint: str) -> None:
    """Write the configuration, and the script of the policy and two rows, one of them wrong, to *folder*."""
    config.write_text(
        f"""
        counter:
          resources_servers:
            counting: {{entrypoint: {entrypoint}, domain: agent, unit: apples, python: {sys.executable}}}
        policy_model:
          responses_api_models:
            gymsdk_model: {{model: "scripted/script:{folder}/script.jsonl"}}
        """
    )
    turns = [{"calls": [{"name": "add", "arguments": {"amount": amount}}]} for amount in (1, 2)]
    rows = [{"responses_create_params": PARAMS, "agent_ref": {"name": AGENT}, "total": total} for total in (3, 4)]
    for name, lines in (("script", [*turns, {"text": "three"}]), ("rows", rows)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
