"""Inspect's own agent, played against a model server, its tools those of a resources server.

usage: inspect_agent.py PLAN      run by the Python that inspect_ai is installed for
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval  # noqa: A004  # the name that its users write
from inspect_ai.agent import AgentState, react, run
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser, get_model
from inspect_ai.scorer import Score, Target, mean, scorer
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.tool import ToolDef, ToolParams
from session import Session, opened, rows_of, show


@solver
def playing(resources: dict[str, str]):  # noqa: ANN201  # a type of its own, and this runs elsewhere
    """Give what plays a sample's row by inspect's react agent, and has it judged."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001  # inspect gives it
        async with opened(state.metadata["row"], resources) as session:
            agent = react(prompt=None, tools=[tool(session, each) for each in session.tools], submit=False)
            before = len(state.messages)
            played = await run(agent, AgentState(messages=state.messages))
            noted(session, played.messages[before:])
            state.messages, state.output = played.messages, played.output
            state.metadata["told"] = await session.verdict()
        return state

    return solve


@scorer(metrics=[mean()])
def rewarded():  # noqa: ANN201  # as above
    """Give what scores a sample by its row's reward."""

    async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001  # inspect gives it
        told = state.metadata["told"]
        return Score(value=told["reward"], metadata=told)

    return score


def tool(session: Session, schema: dict[str, Any]) -> ToolDef:
    """Give a tool of the row as one of inspect's."""

    async def execute(**arguments: Any) -> str:
        return await session.call(schema["name"], arguments)

    parameters = ToolParams.model_validate(schema["parameters"])
    for name, each in parameters.properties.items():
        # Inspect takes no tool that leaves one out.
        each.description = each.description or name
    return ToolDef(execute, schema["name"], schema["description"], parameters)


def noted(session: Session, messages: list[Any]) -> None:
    """Note what the agent's *messages* say."""
    for message in messages:
        if isinstance(message, ChatMessageTool):
            session.answered(message.tool_call_id, message.text)
        elif isinstance(message, ChatMessageAssistant):
            session.said(message.text)
            for call in message.tool_calls or []:
                session.called(call.function, call.arguments, call.id)


def sample(row: dict[str, Any]) -> Sample:
    """Give the sample that a *row* is."""
    kinds = {"system": ChatMessageSystem, "developer": ChatMessageSystem, "user": ChatMessageUser}
    messages = [kinds[each["role"]](content=each["content"]) for each in row["responses_create_params"]["input"]]
    return Sample(input=messages, metadata={"row": row})


def main(plan: dict[str, Any]) -> None:
    """Play the plan's rows as each of its asks says."""
    rows = rows_of(plan)
    for by, ask in plan["asks"].items():
        model = get_model(ask["model"], base_url=ask["base_url"], api_key="any", **ask.get("words", {}))
        task = Task(dataset=[sample(row) for row in rows], solver=playing(plan["resources"]), scorer=rewarded())
        with tempfile.TemporaryDirectory() as folder:
            words = {"log_dir": folder, "display": "none", "max_retries": 0, "timeout": 60, **ask.get("config", {})}
            [log] = eval(task, model=model, fail_on_error=False, **words)
            # What a log has of samples it reads from its file.
            told(by, log)


def told(by: str, log: Any) -> None:
    """Print what came of the rows, as the *log* of an evaluation has it."""
    if log.status != "success":
        show(by, error=str(log.error))
    for each in sorted(log.samples or [], key=lambda each: each.id):
        show(by, **({"error": each.error.message} if each.error else each.scores["rewarded"].metadata))


main(json.loads(Path(sys.argv[1]).read_text()))
