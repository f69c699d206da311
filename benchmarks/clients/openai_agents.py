"""The Agents SDK of OpenAI, played against a model server, its tools those of a resources server; it streams.

usage: openai_agents.py PLAN      run by the Python that openai-agents is installed for
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from session import Session, opened, rows_of, show

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
TURNS = 50


def tool(session: Session, schema: dict[str, Any]) -> FunctionTool:
    """Give a tool of the row as one of the SDK's."""

    async def invoked(_: Any, arguments: str) -> str:
        return await session.call(schema["name"], json.loads(arguments))

    return FunctionTool(schema["name"], schema["description"], schema["parameters"], invoked, strict_json_schema=False)


def noted(session: Session, items: list[dict[str, Any]]) -> None:
    """Note what the *items* of a run say."""
    for item in items:
        match item.get("type", "message"):
            case "message":
                session.said("".join(part["text"] for part in item["content"]))
            case "function_call":
                session.called(item["name"], json.loads(item["arguments"]), item["call_id"])
            case "function_call_output":
                session.answered(item["call_id"], item["output"])


async def played(session: Session, model: Any) -> None:
    """Play the session's row."""
    tools = [tool(session, each) for each in session.tools]
    lead = "\n\n".join(text for role, text in session.prompt if role == "system")
    said = [{"role": role, "content": text} for role, text in session.prompt if role != "system"]
    settings = ModelSettings(include_usage=True)
    agent = Agent(name="player", instructions=lead, model=model, tools=tools, model_settings=settings)
    run = Runner.run_streamed(agent, said, max_turns=TURNS)
    async for _ in run.stream_events():
        pass
    noted(session, run.to_input_list()[len(said) :])


async def main(plan: dict[str, Any]) -> None:
    """Play the plan's rows as each of its asks says."""
    set_tracing_disabled(disabled=True)
    rows = rows_of(plan)
    for by, ask in plan["asks"].items():
        async with AsyncOpenAI(base_url=ask["base_url"], api_key="any", max_retries=0) as client:
            model = MODELS[ask["model"]]("policy", client)
            for row in rows:
                async with opened(row, plan["resources"]) as session:
                    await played(session, model)
                    show(by, **await session.verdict())


asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
