"""An agent of Pydantic AI, played against a model server, its tools those of a resources server; it streams.

usage: pydantic_agent.py PLAN      run by the Python that pydantic-ai is installed for
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
from session import Session, opened, rows_of, show

MODELS = {
    "chat": (OpenAIChatModel, OpenAIProvider),
    "responses": (OpenAIResponsesModel, OpenAIProvider),
    "messages": (AnthropicModel, AnthropicProvider),
}


def tool(session: Session, schema: dict[str, Any]) -> Tool:
    """Give a tool of the row as one of Pydantic AI's."""

    async def called(**arguments: Any) -> str:
        return await session.call(schema["name"], arguments)

    name, about = schema["name"], schema["description"]
    return Tool.from_schema(called, name, about, schema["parameters"], sequential=True)


def noted(session: Session, parts: list[Any]) -> None:
    """Note what the *parts* of a run's messages say."""
    for part in parts:
        if isinstance(part, TextPart):
            session.said(part.content)
        elif isinstance(part, ToolCallPart):
            session.called(part.tool_name, part.args_as_dict(), part.tool_call_id)
        elif isinstance(part, ToolReturnPart):
            session.answered(part.tool_call_id, part.content)


async def heard(_: Any, events: AsyncIterable[Any]) -> None:
    """Take what is streamed: that somebody does is why it is."""
    async for _event in events:
        pass


async def played(session: Session, model: Any) -> None:
    """Play the session's row."""
    lead = [text for role, text in session.prompt if role == "system"]
    [asked] = [text for role, text in session.prompt if role == "user"]
    agent = Agent(model, system_prompt=lead, tools=[tool(session, each) for each in session.tools])
    run = await agent.run(asked, event_stream_handler=heard)
    noted(session, [part for message in run.all_messages() for part in message.parts])


async def main(plan: dict[str, Any]) -> None:
    """Play the plan's rows as each of its asks says."""
    rows = rows_of(plan)
    for by, ask in plan["asks"].items():
        kind, provider = MODELS[ask["model"]]
        made = partial(kind, "policy", provider=provider(base_url=ask["base_url"], api_key="any"))
        for row in rows:
            async with opened(row, plan["resources"]) as session:
                await played(session, made())
                show(by, **await session.verdict())


asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
