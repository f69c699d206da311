"""Play rows with the OpenAI Agents SDK in streaming mode, a model server, and the tools of a resources server.

usage: openai_agents.py PLAN      run with a Python that has openai-agents installed
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
from session import Session, open_session, read_rows, show

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
TURNS = 50


def tool(session: Session, schema: dict[str, Any]) -> FunctionTool:
    """Convert a tool of the row to a tool of the SDK."""

    async def invoke(_: Any, arguments: str) -> str:
        return await session.call(schema["name"], json.loads(arguments))

    return FunctionTool(schema["name"], schema["description"], schema["parameters"], invoke, strict_json_schema=False)


def record_items(session: Session, items: list[dict[str, Any]]) -> None:
    """Record the *items* of a run as output items."""
    for item in items:
        match item.get("type", "message"):
            case "message":
                session.add_message("".join(part["text"] for part in item["content"]))
            case "function_call":
                session.add_call(item["name"], json.loads(item["arguments"]), item["call_id"])
            case "function_call_output":
                session.add_output(item["call_id"], item["output"])


async def play(session: Session, model: Any) -> None:
    """Play the row of the session."""
    tools = [tool(session, schema) for schema in session.tools]
    instructions_text = "\n\n".join(text for role, text in session.prompt if role == "system")
    messages = [{"role": role, "content": text} for role, text in session.prompt if role != "system"]
    settings = ModelSettings(include_usage=True)
    agent = Agent(name="player", instructions=instructions_text, model=model, tools=tools, model_settings=settings)
    run = Runner.run_streamed(agent, messages, max_turns=TURNS)
    async for _ in run.stream_events():
        pass
    record_items(session, run.to_input_list()[len(messages) :])


async def main(plan: dict[str, Any]) -> None:
    """Play the rows of the plan with each variant."""
    set_tracing_disabled(disabled=True)
    rows = read_rows(plan)
    for name, variant in plan["variants"].items():
        async with AsyncOpenAI(base_url=variant["base_url"], api_key="any", max_retries=0) as client:
            model = MODELS[variant["model"]]("policy", client)
            for row in rows:
                async with open_session(row, plan["resources"]) as session:
                    await play(session, model)
                    show(name, **await session.verdict())


asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
