"""Calling: a tool of a resources server, asked over HTTP with the cookies of the session it belongs to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson

from gymsdk import http, tools
from gymsdk.errors import EpisodeError, Failed, Unscorable, recast
from gymsdk.http import Answer
from gymsdk.servers import jars
from gymsdk.servers.jars import Jar
from gymsdk.servers.tools import RESERVED, STEP
from gymsdk.tools import PARTS
from gymsdk.transcript import Content, Item, ToolCall
from gymsdk.types import Step

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
    jar: Jar = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 600.0
    retry: http.Retry = http.RETRY
    ours: bool = False

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
        self.jar |= answer.cookies
        return answer


async def call(line: Line, action: ToolCall, offered: list[Item], *, deadline: float | None = None) -> Step:
    """Give what answers a tool call; one of a tool not *offered*, or of an endpoint, never leaves this process."""
    names = {tool["name"]: tool for tool in offered if isinstance(tool.get("name"), str) and tool["name"] not in NEVER}
    if action.name not in names:
        return Step(output=tools.refusal(tools.unknown(action.name, names)))
    if not line.ours:
        try:
            json.loads(action.arguments)
        except (ValueError, RecursionError) as error:
            return Step(output=tools.refusal(f"Invalid tool call arguments: {error}"))
    path = "/" + quote(action.name, safe="")
    answer = await line.post(path, action.arguments.encode(), stage="step", deadline=deadline)
    if (failure := broken(answer)) is not None:
        raise failure
    return Step(output=_output(answer, ours=line.ours), done=_done(answer))


def broken(answer: Answer) -> EpisodeError | None:
    """Give what *answer* says is broken beneath the environment, `None` where it is the environment's own answer."""
    said = _object(answer)
    kind, where = said.get("kind"), said.get("stage")
    if answer.ok or not (isinstance(kind, str) and isinstance(where, str)):
        return None
    into = Unscorable if said.get("outcome") == "unscorable" else Failed
    retryable = said.get("retryable")
    return into(
        str(said.get("detail")),
        kind=kind,
        stage=where,
        retryable=retryable if isinstance(retryable, bool) else answer.status >= 500,  # noqa: PLR2004 - its own errors
        retry_after=answer.retry_after,
    )


def refused(answer: Answer, stage: str) -> EpisodeError:
    """Give the failure that an *answer* which is no success means at *stage*."""
    found = broken(answer)
    if found is not None:
        return found
    message = f"{answer.host} answered {answer.status}: {answer.text[: http.EXCERPT]}"
    again = http.worth_retrying(answer.status)
    return Failed(message, kind="server_error", stage=stage, retryable=again, retry_after=answer.retry_after)


def _of_server(error: Failed, stage: str) -> Failed:
    late = error.kind == "model_timeout"
    kind = f"{'tool' if stage == 'step' else 'hook'}_timeout" if late else error.kind.replace("model_", "server_", 1)
    again = recast(error, Failed, kind=kind)
    again.stage = stage
    return again


def _done(answer: Answer) -> bool:
    step = answer.headers.get(STEP)
    return step is not None and orjson.loads(step).get("done") is True


def _output(answer: Answer, *, ours: bool) -> Content:
    """Give the body as the policy reads it: text, or from one of our own servers a list of content parts."""
    if ours and answer.body.startswith(b"["):
        value = _parsed(answer)
        if isinstance(value, list) and value and all(_is_part(each) for each in value):
            return value
    return answer.text


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("type")) in PARTS


def told(answer: Answer, stage: str) -> Item:
    """Give the object that *answer* holds; raises `Failed` where there is none."""
    value = _parsed(answer)
    if isinstance(value, dict):
        return value
    message = f"{answer.host} answered {answer.status} without an object: {answer.text[: http.EXCERPT]!r}"
    raise Failed(message, kind="bad_answer", stage=stage)


def _object(answer: Answer) -> Item:
    value = _parsed(answer)
    return value if isinstance(value, dict) else {}


def _parsed(answer: Answer) -> Any:
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
