"""Environments with hooks that return configured results, or record their arguments."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

from pydantic import Field

from gymsdk import Config, Reset, State, Step, Task, Verdict, hookimpl


class Question(Task):
    answer: int = 42


class Settings(Config):
    level: int = 1


class Count(State):
    steps: int = 0
    seen: list[str] = Field(default_factory=list)


class Judge:
    """The minimal environment; the other environments extend it."""

    @hookimpl
    def verify(self, task, transcript):
        return Verdict(reward=float(transcript.reply == str(task.model_dump().get("answer"))))


class Recorder:
    """An environment that records the arguments of its hooks."""

    def __init__(self) -> None:
        self.given: dict[str, dict[str, Any]] = {}

    @hookimpl
    def reset(self, task: Question, seed, config: Settings, shared):
        self.given["reset"] = {"task": task, "seed": seed, "config": config, "shared": shared}
        return Reset(state=Count())

    @hookimpl
    async def step(self, task, state, action, transcript, config, shared):
        self.given["step"] = {"task": task, "action": action, "shared": shared, "said": len(transcript.items)}
        state.steps += 1
        return Step(done=True)

    @hookimpl
    def verify(self, task, state, transcript, config, shared):
        self.given["verify"] = {"state": state, "reply": transcript.reply, "config": config}
        return Verdict(reward=1.0)

    @hookimpl
    async def close(self, task, state, shared):
        self.given["close"] = {"task": task, "state": state, "shared": shared}

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, config):
        yield f"index {config.level}"


def go(where: str): ...


def stop(): ...


class Tooled(Judge):
    def __init__(self, offered=None) -> None:
        self.offered = offered

    @hookimpl
    def reset(self):
        return Reset(tools=self.offered)

    @hookimpl
    def tools(self):
        return [go, stop]
