"""Calling: a tool of a resources server, asked over HTTP with the cookies of the session it belongs to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from urllib.parse import quote

from gymsdk import http, jars, tools
from gymsdk.errors import Failed, recast
from gymsdk.http import Answer
from gymsdk.jars import Jar
from gymsdk.servers.door.routing import RESERVED
from gymsdk.servers.wire.tools import STEP
from gymsdk.told import broken, value_of
from gymsdk.tools import PARTS
from gymsdk.transcript import Content, Item, ToolCall
from gymsdk.types import Step
from gymsdk.values import parsed

NEVER = RESERVED | {
    "",
    "run",
    "health",
    "healthz",
    "livez",
    "readyz",
    "metrics",
    "stats",
    "docs",
    "redoc",
    "openapi.json",
}
"""What no tool is called: it is something else of a server's."""


@dataclass(slots=True)
class Line:
    """A line to one session at the resources server *at* a base URL: its cookies, what else each request carries.

    *ours* says that the server is one of gymsdk's, which answers what does not fit as in process.
    """

    at: str
    jar: Jar = field(default_factory=dict, repr=False)
    headers: http.Headers = field(default_factory=dict, repr=False)
    seconds: float = 600.0
    retry: http.Retry = http.RETRY
    is_gymsdk: bool = False

    async def post(self, path: str, body: object, *, stage: str, deadline: float | None = None) -> Answer:
        """Give what *path* answers, its cookies kept; raises `Failed` where there is no answer."""
        left = self.seconds if deadline is None else deadline - asyncio.get_running_loop().time()
        headers = {**self.headers, **jars.header(self.jar)}
        try:
            answer = await http.post(
                self.at + path,
                body,
                headers=headers,
                timeout=max(0.001, min(self.seconds, left)),
                retry=self.retry,
                once=True,
            )
        except Failed as error:
            raise _of_server(error, stage) from error
        self.jar |= jars.sound(answer.cookies)
        return answer


async def call(line: Line, action: ToolCall, offered: list[Item], *, deadline: float | None = None) -> Step:
    """Give what answers a tool call; one of a tool not *offered*, or of an endpoint, never leaves this process."""
    names = {tool["name"]: tool for tool in offered if isinstance(tool.get("name"), str) and tool["name"] not in NEVER}
    if action.name not in names:
        return Step(output=tools.refusal(tools.unknown(action.name, names)))
    if not line.is_gymsdk:
        try:
            json.loads(action.arguments)
        except (ValueError, RecursionError) as error:
            return Step(output=tools.refusal(f"Invalid tool call arguments: {error}"))
    path = "/" + quote(action.name, safe="")
    answer = await line.post(path, action.arguments.encode("utf-8", "replace"), stage="step", deadline=deadline)
    if (failure := broken(answer)) is not None:
        raise failure
    return Step(output=_output(answer, ours=line.is_gymsdk), done=_done(answer))


def _of_server(error: Failed, stage: str) -> Failed:
    late = error.kind == "model_timeout"
    kind = f"{'tool' if stage == 'step' else 'hook'}_timeout" if late else error.kind.replace("model_", "server_", 1)
    again = recast(error, Failed, kind=kind)
    again.stage = stage
    return again


def _done(answer: Answer) -> bool:
    step = answer.headers.get(STEP)
    return step is not None and parsed(step).get("done") is True


def _output(answer: Answer, *, ours: bool) -> Content:
    """Give the body as the policy reads it: text, or from one of our own servers a list of content parts."""
    if ours and answer.body.startswith(b"["):
        value = value_of(answer)
        if isinstance(value, list) and value and all(_is_part(each) for each in value):
            return value
    return answer.text


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("type")) in PARTS
