"""An environment that rewards notes, one with rewards for steps, and helpers to play them and to read rollouts."""

from __future__ import annotations

import asyncio

from pydantic import Field

from gymsdk import Reset, State, Step, ToolCall, Verdict, hookimpl


class Log(State):
    done: list[str] = Field(default_factory=list)


def note(state: Log, what: str) -> str:
    state.done.append(what)
    return f"noted {what}"


class Notebook:
    """An environment with a reward for each note."""

    def __init__(self) -> None:
        self.closed = 0

    @hookimpl
    def reset(self):
        return Reset(state=Log())

    @hookimpl
    def tools(self):
        return [note]

    @hookimpl
    def verify(self, state: Log, transcript):
        return Verdict(reward=float(len(state.done)), components={"noted": float(len(state.done))})

    @hookimpl
    def close(self):
        self.closed += 1


class Paying(Notebook):
    """An environment with a `step` hook that returns rewards and messages, and ends the episode on request."""

    @hookimpl
    def step(self, state, action):
        text = action.parsed()["what"] if isinstance(action, ToolCall) else action.text
        state.done.append(text)
        output = f"heard {text}" if isinstance(action, ToolCall) else None
        return Step(output=output, messages=[f"next after {text}"], reward=0.5, done=text == "stop")


def notes(*what):
    return [("note", {"what": entry}) for entry in what]


def outputs(rollout):
    return [item["output"] for item in rollout.response["output"] if item["type"] == "function_call_output"]


class Slow:
    """A model that answers its first request and never answers the second."""

    def __init__(self, first) -> None:
        self.first = first
        self.is_asked = asyncio.Event()

    async def respond(self, request, *, episode=None):
        first, self.first = self.first, None
        self.is_asked.set()
        return first or await asyncio.Event().wait()
