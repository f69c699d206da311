"""Tool calls over HTTP: `POST /<tool>` on the server side, and the client's connection to a session."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gymsdk import tools
from gymsdk.client import parse_failure, parse_value
from gymsdk.episode import TurnResult
from gymsdk.errors import Failed, convert_error
from gymsdk.http import client
from gymsdk.http.client import Cookies, HttpResponse
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.servers.app import RequestRejected, document_endpoint, read_body
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.routing import RESERVED_PATHS
from gymsdk.servers.sessions import Session
from gymsdk.tools import CONTENT_PART_TYPES
from gymsdk.types import Content, Item, Step, ToolCall

STEP_HEADER = "x-gymsdk-step"
"""Response header with a call's reward and whether the episode is over."""

CLIENT_HEADER = "x-gymsdk-client"
"""Request header that identifies gymsdk's own clients: a policy controls a request's arguments, but not its headers."""

OTHER_METHODS = ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

log = logging.getLogger("gymsdk")


RESERVED_TOOL_NAMES = RESERVED_PATHS | {
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
"""Paths of a server that cannot be tool names."""


def add_routes(app: FastAPI, episodes: EpisodeService) -> None:
    """Add the tool endpoints to an app, after all other routes; warn of tools that are named like another endpoint."""
    tools, name = episodes.environment.tools, episodes.environment.name
    if hidden := sorted(RESERVED_PATHS & tools.keys()):
        log.warning(
            "environment %r: tools named like an endpoint cannot be called over HTTP: %s; rename them, or call"
            " them through /step or /mcp",
            name,
            ", ".join(hidden),
        )

    async def call(request: Request) -> Response:
        """Call this tool with the arguments in the body; the response is its output as the policy reads it."""
        return await _call_tool(request, episodes, request.path_params.get("tool", request.url.path.removeprefix("/")))

    async def reject(request: Request) -> Response:
        raise _no_tool_error(request)

    for tool in _callable_names(tools.keys()):
        schema = tools[tool].schema["parameters"]
        app.add_api_route(f"/{tool}", call, methods=["POST"], name=tool, **document_endpoint(schema, required=False))
    app.add_api_route("/{tool}", call, methods=["POST"], include_in_schema=False)
    app.add_api_route("/{tool}", reject, methods=OTHER_METHODS, include_in_schema=False)


def _callable_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in RESERVED_PATHS]


async def _call_tool(request: Request, episodes: EpisodeService, name: str) -> Response:
    session = episodes.sessions.find_by_token(request.scope["state"]["token"])
    if name in RESERVED_PATHS or not _is_offered_tool(name, episodes, session):
        if session is not None:
            session.calls.append(ToolCall(name=name, arguments=""))
        raise _no_tool_error(request)
    arguments = await _read_arguments(request)
    if session is not None:
        # An agent's response contains the call even if it is rejected below.
        session.calls.append(ToolCall(name=name, arguments=arguments))
    async with episodes.lock_playing_session(session, "tools", "typed") as locked:
        output, effects = await episodes.call_tool(locked, name, arguments)
    return _build_output(output["output"], effects)


def _no_tool_error(request: Request) -> HTTPException:
    """Return the error for a path without a tool: 405 if the path exists with another method, else 404."""
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.path == request.url.path]
    methods = {method for route in routes for method in route.methods or ()} - {"HEAD"}
    return HTTPException(405, headers={"allow": ", ".join(sorted(methods))}) if methods else HTTPException(404)


def _is_offered_tool(name: str, episodes: EpisodeService, session: Session | None) -> bool:
    if name in episodes.environment.tools:
        return True
    episode = session.runner.episode if session else None
    return episode is not None and any(tool["name"] == name for tool in episode.tools)


async def _read_arguments(request: Request) -> str:
    try:
        return (await read_body(request)).decode()
    except UnicodeDecodeError:
        raise RequestRejected(422, "the body is not UTF-8 text") from None


def _build_output(output: Content, effects: TurnResult) -> Response:
    text = output.encode("utf-8", "replace") if isinstance(output, str) else dump_json(output)
    answer = Response(text, media_type="application/json" if _is_json(text) else "text/plain")
    if effects.reward or effects.ended:
        answer.headers[STEP_HEADER] = dump_json({"reward": effects.reward, "done": effects.ended is not None}).decode()
    return answer


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text, strict=True)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class SessionConnection:
    """A connection to one session at a resources server.

    Attributes:
        base_url: The server's URL.
        cookies: The session's cookies.
        headers: Further headers of each request.
        seconds: The timeout of a request.
        retry: Retries of failed requests.
        is_gymsdk: Whether the server is gymsdk's, which validates tool arguments itself.
    """

    base_url: str
    cookies: Cookies = field(default_factory=dict, repr=False)
    headers: client.Headers = field(default_factory=dict, repr=False)
    seconds: float = 600.0
    retry: client.Retry = client.DEFAULT_RETRY
    is_gymsdk: bool = False

    async def post(self, path: str, body: object, *, stage: str, deadline: float | None = None) -> HttpResponse:
        """Send a POST request and store the cookies of the response.

        Args:
            path: The path below the server's URL.
            body: The body.
            stage: The stage of the episode, for failures.
            deadline: When the request must end, on the event loop's clock.

        Raises:
            Failed: The server did not answer.
        """
        left = self.seconds if deadline is None else deadline - asyncio.get_running_loop().time()
        headers = {**self.headers, **client.build_cookie_header(self.cookies)}
        try:
            answer = await client.post(
                self.base_url + path,
                body,
                headers=headers,
                timeout=max(0.001, min(self.seconds, left)),
                retry=self.retry,
                once=True,
            )
        except Failed as error:
            raise _to_server_failure(error, stage) from error
        self.cookies |= client.filter_cookies(answer.cookies)
        return answer


async def call_tool(
    connection: SessionConnection, action: ToolCall, offered: list[Item], *, deadline: float | None = None
) -> Step:
    """Call a tool.

    A call of a tool that is not offered, or that is named like an endpoint, gets an error output and is not sent.

    Args:
        connection: The connection to the session.
        action: The tool call.
        offered: The tools of the episode.
        deadline: When the call must end, on the event loop's clock.
    """
    names = {
        tool["name"]: tool
        for tool in offered
        if isinstance(tool.get("name"), str) and tool["name"] not in RESERVED_TOOL_NAMES
    }
    if action.name not in names:
        return Step(output=tools.format_error_output(tools.format_unknown_tool(action.name, names)))
    if not connection.is_gymsdk:
        try:
            json.loads(action.arguments)
        except (ValueError, RecursionError) as error:
            return Step(output=tools.format_error_output(f"Invalid tool call arguments: {error}"))
    path = "/" + quote(action.name, safe="")
    answer = await connection.post(path, action.arguments.encode("utf-8", "replace"), stage="step", deadline=deadline)
    if (failure := parse_failure(answer)) is not None:
        raise failure
    return Step(output=_parse_output(answer, is_gymsdk=connection.is_gymsdk), done=_is_done(answer))


def _to_server_failure(error: Failed, stage: str) -> Failed:
    is_timeout = error.kind == "model_timeout"
    kind = (
        f"{'tool' if stage == 'step' else 'hook'}_timeout" if is_timeout else error.kind.replace("model_", "server_", 1)
    )
    converted = convert_error(error, Failed, kind=kind)
    converted.stage = stage
    return converted


def _is_done(answer: HttpResponse) -> bool:
    step = answer.headers.get(STEP_HEADER)
    return step is not None and parse_json(step).get("done") is True


def _parse_output(answer: HttpResponse, *, is_gymsdk: bool) -> Content:
    """Return the body as the policy reads it: text, or content parts from a gymsdk server."""
    if is_gymsdk and answer.body.startswith(b"["):
        value = parse_value(answer)
        if isinstance(value, list) and value and all(_is_content_part(each) for each in value):
            return value
    return answer.text


def _is_content_part(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("type")) in CONTENT_PART_TYPES
