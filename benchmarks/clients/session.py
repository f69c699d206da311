"""A session at a resources server, as somebody else's agent holds one: tools by POST, then the verdict."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SYSTEM = ("system", "developer")
PATIENCE = 60.0
"""Seconds that one answer may take."""


@dataclass
class Session:
    """One row that is played: what its tools answered, and what has been said and called, as output items."""

    row: dict[str, Any]
    client: httpx.AsyncClient
    output: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that the row offers."""
        return self.row["responses_create_params"]["tools"]

    @property
    def prompt(self) -> list[tuple[str, str]]:
        """The row's messages, whether each is the system's and its text."""
        messages = self.row["responses_create_params"]["input"]
        return [("system" if each["role"] in SYSTEM else each["role"], each["content"]) for each in messages]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Give what a tool answers."""
        answer = await self.client.post(f"/{name}", json=arguments)
        answer.raise_for_status()
        return answer.text

    def said(self, text: str) -> None:
        """Note a text of the policy's."""
        if text:
            part = {"type": "output_text", "text": text, "annotations": []}
            self.output.append({"type": "message", "role": "assistant", "content": [part]})

    def called(self, name: str, arguments: dict[str, Any], call_id: str) -> None:
        """Note a call of the policy's."""
        words = {"name": name, "arguments": json.dumps(arguments), "call_id": call_id}
        self.output.append({"type": "function_call", **words})

    def answered(self, call_id: str, text: str) -> None:
        """Note what was given back for a call."""
        self.output.append({"type": "function_call_output", "call_id": call_id, "output": text})

    async def verdict(self) -> dict[str, Any]:
        """Give the row's reward, and what its tools answered."""
        answer = await self.client.post("/verify", json={**self.row, "response": {"output": self.output}})
        answer.raise_for_status()
        told = [item["output"] for item in self.output if item["type"] == "function_call_output"]
        return {"reward": answer.json()["reward"], "outputs": told}


@asynccontextmanager
async def opened(row: dict[str, Any], resources: dict[str, str]) -> AsyncIterator[Session]:
    """Open a session of *row* at that one of *resources* servers that is its environment's."""
    url = resources[row["agent_ref"]["name"].removesuffix("_simple_agent")]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        (await client.post("/seed_session", json=row)).raise_for_status()
        yield Session(row, client)


def rows_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the rows that a *plan* names the file of."""
    return [json.loads(line) for line in Path(plan["rows"]).read_text().splitlines()]


def show(by: str, **told: Any) -> None:
    """Print a line of what came of a row that was played *by* somebody."""
    print("LINE", json.dumps({"by": by, **told}), flush=True)
