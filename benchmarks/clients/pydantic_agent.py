"""Play rows with a Pydantic AI agent in streaming mode, a model server, and the tools of a resources server.

usage: pydantic_agent.py PLAN      run with a Python that has pydantic-ai installed
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_ai import Agent, Tool
from pydantic_ai.messages import TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from session import Session, open_session, read_rows, show

MODELS = {
    "chat": (OpenAIChatModel, OpenAIProvider),
    "responses": (OpenAIResponsesModel, OpenAIProvider),
    "messages": (AnthropicModel, AnthropicProvider),
}


def tool(session: Session, schema: dict[str, Any]) -> Tool:
    """Convert a tool of the row to a Pydantic AI tool."""

    async def call_tool(**arguments: Any) -> str:
        return await session.call(schema["name"], arguments)

    name, description = schema["name"], schema["description"]
    return Tool.from_schema(call_tool, name, description, schema["parameters"], sequential=True)


def record_parts(session: Session, parts: list[Any]) -> None:
    """Record the *parts* of the messages as output items."""
    for part in parts:
        if isinstance(part, TextPart):
            session.add_message(part.content)
        elif isinstance(part, ToolCallPart):
            session.add_call(part.tool_name, part.args_as_dict(), part.tool_call_id)
        elif isinstance(part, ToolReturnPart):
            session.add_output(part.tool_call_id, part.content)


async def consume_events(_: Any, events: AsyncIterable[Any]) -> None:
    """Consume the stream of events. The agent streams only if it has an event handler."""
    async for _event in events:
        pass


async def play(session: Session, model: Any) -> None:
    """Play the row of the session."""
    system_texts = [text for role, text in session.prompt if role == "system"]
    [prompt] = [text for role, text in session.prompt if role == "user"]
    agent = Agent(model, system_prompt=system_texts, tools=[tool(session, schema) for schema in session.tools])
    run = await agent.run(prompt, event_stream_handler=consume_events)
    record_parts(session, [part for message in run.all_messages() for part in message.parts])


async def main(plan: dict[str, Any]) -> None:
    """Play the rows of the plan with each variant."""
    rows = read_rows(plan)
    for name, variant in plan["variants"].items():
        kind, provider = MODELS[variant["model"]]
        build_model = partial(kind, "policy", provider=provider(base_url=variant["base_url"], api_key="any"))
        for row in rows:
            async with open_session(row, plan["resources"]) as session:
                await play(session, build_model())
                show(name, **await session.verdict())


asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
