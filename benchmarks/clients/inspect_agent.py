"""Play rows with the react agent of Inspect, a model server, and the tools of a resources server.

usage: inspect_agent.py PLAN      run with a Python that has inspect_ai installed
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval  # noqa: A004  # the public name in inspect_ai
from inspect_ai.agent import AgentState, react, run
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser, get_model
from inspect_ai.scorer import Score, Target, mean, scorer
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.tool import ToolDef, ToolParams
from session import Session, open_session, read_rows, show


@solver
def playing(resources: dict[str, str]):  # noqa: ANN201  # a type of inspect_ai, which the checker does not have
    """Return a solver that plays the row of a sample with the react agent and verifies the result."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001  # inspect passes it
        async with open_session(state.metadata["row"], resources) as session:
            agent = react(prompt=None, tools=[tool(session, schema) for schema in session.tools], submit=False)
            before = len(state.messages)
            played = await run(agent, AgentState(messages=state.messages))
            record_messages(session, played.messages[before:])
            state.messages, state.output = played.messages, played.output
            state.metadata["verdict"] = await session.verdict()
        return state

    return solve


@scorer(metrics=[mean()])
def rewarded():  # noqa: ANN201  # as above
    """Return a scorer that uses the reward of the row."""

    async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001  # inspect passes it
        verdict = state.metadata["verdict"]
        return Score(value=verdict["reward"], metadata=verdict)

    return score


def tool(session: Session, schema: dict[str, Any]) -> ToolDef:
    """Convert a tool of the row to an Inspect tool."""

    async def execute(**arguments: Any) -> str:
        return await session.call(schema["name"], arguments)

    parameters = ToolParams.model_validate(schema["parameters"])
    for name, parameter in parameters.properties.items():
        # Inspect rejects a tool if a parameter has no description.
        parameter.description = parameter.description or name
    return ToolDef(execute, schema["name"], schema["description"], parameters)


def record_messages(session: Session, messages: list[Any]) -> None:
    """Record the *messages* of the agent as output items."""
    for message in messages:
        if isinstance(message, ChatMessageTool):
            session.add_output(message.tool_call_id, message.text)
        elif isinstance(message, ChatMessageAssistant):
            session.add_message(message.text)
            for call in message.tool_calls or []:
                session.add_call(call.function, call.arguments, call.id)


def sample(row: dict[str, Any]) -> Sample:
    """Convert a *row* to a sample."""
    kinds = {"system": ChatMessageSystem, "developer": ChatMessageSystem, "user": ChatMessageUser}
    messages = [
        kinds[message["role"]](content=message["content"]) for message in row["responses_create_params"]["input"]
    ]
    return Sample(input=messages, metadata={"row": row})


def main(plan: dict[str, Any]) -> None:
    """Play the rows of the plan with each variant."""
    rows = read_rows(plan)
    for name, variant in plan["variants"].items():
        model = get_model(
            variant["model"], base_url=variant["base_url"], api_key="any", **variant.get("model_args", {})
        )
        task = Task(dataset=[sample(row) for row in rows], solver=playing(plan["resources"]), scorer=rewarded())
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "log_dir": folder,
                "display": "none",
                "max_retries": 0,
                "timeout": 60,
                **variant.get("config", {}),
            }
            [log] = eval(task, model=model, fail_on_error=False, **options)
            # The log reads its samples from its file, so print them before the folder is removed.
            show_results(name, log)


def show_results(name: str, log: Any) -> None:
    """Print the result of each row from the *log* of an evaluation."""
    if log.status != "success":
        show(name, error=str(log.error))
    for evaluated in sorted(log.samples or [], key=lambda result: result.id):
        show(name, **({"error": evaluated.error.message} if evaluated.error else evaluated.scores["rewarded"].metadata))


main(json.loads(Path(sys.argv[1]).read_text()))
