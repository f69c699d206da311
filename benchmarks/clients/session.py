"""A client session of a foreign agent at a resources server: tool calls by POST, then the verdict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SYSTEM_ROLES = ("system", "developer")
RESPONSE_SECONDS = 60.0
"""Time limit for one response, in seconds."""


@dataclass
class Session:
    """The session of one row, with the messages, tool calls and tool outputs so far as output items."""

    row: dict[str, Any]
    client: httpx.AsyncClient
    output: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the row."""
        return self.row["responses_create_params"]["tools"]

    @property
    def prompt(self) -> list[tuple[str, str]]:
        """The role and the text of each message of the row; a developer message has the role system."""
        messages = self.row["responses_create_params"]["input"]
        return [
            ("system" if message["role"] in SYSTEM_ROLES else message["role"], message["content"])
            for message in messages
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its output."""
        answer = await self.client.post(f"/{name}", json=arguments)
        answer.raise_for_status()
        return answer.text

    def add_message(self, text: str) -> None:
        """Record a message of the policy."""
        if text:
            part = {"type": "output_text", "text": text, "annotations": []}
            self.output.append({"type": "message", "role": "assistant", "content": [part]})

    def add_call(self, name: str, arguments: dict[str, Any], call_id: str) -> None:
        """Record a tool call of the policy."""
        fields = {"name": name, "arguments": json.dumps(arguments), "call_id": call_id}
        self.output.append({"type": "function_call", **fields})

    def add_output(self, call_id: str, text: str) -> None:
        """Record the output of a tool call."""
        self.output.append({"type": "function_call_output", "call_id": call_id, "output": text})

    async def verdict(self) -> dict[str, Any]:
        """Verify the row; return its reward and the tool outputs."""
        answer = await self.client.post("/verify", json={**self.row, "response": {"output": self.output}})
        answer.raise_for_status()
        outputs = [item["output"] for item in self.output if item["type"] == "function_call_output"]
        return {"reward": answer.json()["reward"], "outputs": outputs}


@asynccontextmanager
async def open_session(row: dict[str, Any], resources: dict[str, str]) -> AsyncIterator[Session]:
    """Open a session of *row* at the resources server of its environment."""
    url = resources[row["agent_ref"]["name"].removesuffix("_simple_agent")]
    async with httpx.AsyncClient(base_url=url, timeout=RESPONSE_SECONDS) as client:
        (await client.post("/seed_session", json=row)).raise_for_status()
        yield Session(row, client)


def read_rows(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the rows from the file that *plan* names."""
    return [json.loads(line) for line in Path(plan["rows"]).read_text().splitlines()]


def show(name: str, **result: Any) -> None:
    """Print the result of a row of the variant *name* as one line."""
    print("LINE", json.dumps({"by": name, **result}), flush=True)
