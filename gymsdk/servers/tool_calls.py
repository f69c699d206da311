"""Tool calls over HTTP and MCP: the routes of a server, and the connection of a client to a session."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gymsdk import tools
from gymsdk.client import parse_failure, parse_value
from gymsdk.edge.app import ServerApp
from gymsdk.edge.cookies import KEY_HEADER
from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.openapi import document_endpoint
from gymsdk.edge.request import json_response, read_body, read_json_object
from gymsdk.episode import TurnResult
from gymsdk.errors import EpisodeError, Failed, convert_error
from gymsdk.http import client
from gymsdk.http.client import Cookies, HttpResponse
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.matching import RESERVED_PATHS
from gymsdk.servers.sessions import Session
from gymsdk.tools import is_content_list
from gymsdk.types import Content, Item, Step, ToolCall

STEP_HEADER = "x-gymsdk-step"
"""Response header with a call's reward and whether the episode is over."""

OTHER_METHODS = ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

log = logging.getLogger("gymsdk")


RESERVED_TOOL_NAMES = RESERVED_PATHS | frozenset(
    {"", "run", "health", "healthz", "livez", "readyz", "metrics", "stats", "docs", "redoc", "openapi.json"}
)
"""Paths of a server that cannot be tool names."""


def add_routes(app: ServerApp, episodes: EpisodeService) -> None:
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

    for tool in [name for name in tools if name not in RESERVED_PATHS]:
        schema = tools[tool].schema["parameters"]
        app.add_post(f"/{tool}", call, name=tool, **document_endpoint(schema, required=False))
    app.add_api_route("/{tool}", call, methods=["POST"], include_in_schema=False)
    app.add_api_route("/{tool}", reject, methods=OTHER_METHODS, include_in_schema=False)


async def _call_tool(request: Request, episodes: EpisodeService, name: str) -> Response:
    session = episodes.find_session(request)
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
    return session is not None and any(tool["name"] == name for tool in session.tools)


async def _read_arguments(request: Request) -> str:
    try:
        return (await read_body(request)).decode()
    except UnicodeDecodeError:
        raise RequestRejected(422, "the body is not UTF-8 text") from None


def _build_output(output: Content, effects: TurnResult) -> Response:
    # An unpaired surrogate, which a tool may return, has no form in UTF-8.
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
                # A deadline that has passed must fail as a timeout whose message names no negative seconds.
                timeout=max(0.001, min(self.seconds, left)),
                retry=self.retry,
                # A tool may have effects, so a request that may have arrived is not sent again.
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
        # Other servers fail on arguments that are no JSON; the policy gets an error output instead.
        try:
            json.loads(action.arguments)
        except (ValueError, RecursionError) as error:
            return Step(output=tools.format_error_output(f"Invalid tool call arguments: {error}"))
    # The policy chooses the name, which must remain one segment of the path.
    path = "/" + quote(action.name, safe="", errors="replace")
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
        if is_content_list(value):
            return value
    return answer.text


PROTOCOL_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Supported versions of the protocol, newest first."""

NOTIFICATION_RESPONSES = {
    202: "The notification was accepted.",
    403: "The request comes from a web page of another host.",
}

METHOD_NOT_FOUND, INVALID_PARAMS = -32601, -32602

MethodHandler: TypeAlias = Callable[[Item, Session | None], Awaitable[Item]]


class RpcError(Exception):
    """A JSON-RPC error response.

    Args:
        code: The JSON-RPC error code.
        message: The reason.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def mcp_add_routes(app: FastAPI, episodes: EpisodeService, name: str) -> None:
    """Add `/mcp` to an app; `name` is the server's name in the protocol."""
    protocol = McpEndpoint(episodes, name, app.version)
    message = {"type": "object", "required": ["jsonrpc", "method"], "properties": {"jsonrpc": {"const": "2.0"}}}
    app.add_api_route(
        "/mcp", protocol.post, methods=["POST"], **document_endpoint(message, more=NOTIFICATION_RESPONSES)
    )
    app.add_api_route("/mcp", _reject_stream, methods=["GET", "DELETE"], include_in_schema=False)


async def _reject_stream() -> Response:
    raise HTTPException(405, headers={"allow": "POST"})


class McpEndpoint:
    """The endpoint.

    Args:
        episodes: The open episodes.
        name: The server's name.
        version: The server's version.
    """

    def __init__(self, episodes: EpisodeService, name: str, version: str) -> None:
        self._episodes = episodes
        self._name = name
        self._version = version
        self._methods: dict[str, MethodHandler] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
        }

    async def post(self, request: Request) -> Response:
        """Answer one JSON-RPC message."""
        _check_origin(request)
        message = await read_json_object(request)
        if "id" not in message:
            return Response(status_code=202)
        session = self._episodes.sessions.find_by_key(request.headers.get(KEY_HEADER), request.scope)
        envelope = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            return json_response(envelope | {"result": await self._handle_message(message, session)})
        except RpcError as error:
            return json_response(envelope | {"error": {"code": error.code, "message": str(error)}})

    async def _handle_message(self, message: Item, session: Session | None) -> Item:
        method = message.get("method")
        if not isinstance(method, str) or method not in self._methods:
            raise RpcError(METHOD_NOT_FOUND, f"unknown method {str(method)[:80]!r}")
        params = message.get("params")
        if params is not None and not isinstance(params, dict):
            raise RpcError(INVALID_PARAMS, "`params` must be an object")
        return await self._methods[method](params or {}, session)

    async def _initialize(self, params: Item, _: Session | None) -> Item:
        requested = params.get("protocolVersion")
        return {
            "protocolVersion": requested if requested in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": self._name, "version": self._version},
        }

    async def _ping(self, _: Item, __: Session | None) -> Item:
        return {}

    async def _list_tools(self, _: Item, session: Session | None) -> Item:
        return {"tools": [_to_mcp_tool(tool) for tool in self._offered_tools(session)]}

    async def _call_tool(self, params: Item, session: Session | None) -> Item:
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str):
            raise RpcError(INVALID_PARAMS, "`name` must be the name of a tool")
        if session is None:
            return _to_mcp_result(f"Missing {KEY_HEADER} for Gym MCP tool call.", failed=True)
        text = dump_json({} if arguments is None else arguments).decode()
        session.calls.append(ToolCall(name=name, arguments=text))
        if not any(tool["name"] == name for tool in self._offered_tools(session)):
            raise RpcError(INVALID_PARAMS, f"unknown tool {name[:80]!r}; call `tools/list` for the list of tools")
        try:
            async with self._episodes.lock_playing_session(session, "tools", "typed"):
                output, _ = await self._episodes.call_tool(session, name, text)
        except (RequestRejected, EpisodeError) as error:
            status = error.status if isinstance(error, RequestRejected) else 503 if error.retryable else 422
            return _to_mcp_result(f"HTTP {status} from POST /{name}: {error}", failed=True)
        return _to_mcp_result(output["output"])

    def _offered_tools(self, session: Session | None) -> list[Item]:
        if session is None:
            return [tool.schema for tool in self._episodes.environment.tools.values()]
        return session.tools


def _check_origin(request: Request) -> None:
    """Reject web pages of other hosts, which could reach a server on loopback."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise RequestRejected(403, "this web page may not call tools: its origin is another host")


def _to_mcp_tool(tool: Item) -> Item:
    schema = tool.get("parameters")
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "inputSchema": schema if isinstance(schema, dict) and schema.get("type") == "object" else {"type": "object"},
    }


def _to_mcp_result(output: Content, *, failed: bool = False) -> Item:
    if not isinstance(output, str):
        return {"content": [_to_mcp_content(part) for part in output], "isError": failed}
    structured_value = _parse_object(output)
    extra = {} if structured_value is None else {"structuredContent": structured_value}
    return {"content": [{"type": "text", "text": output}], **extra, "isError": failed}


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = parse_json(text, strict=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _to_mcp_content(part: Item) -> Item:
    """Convert one output part; an image in a data URL becomes an MCP image."""
    head, _, data = str(part.get("image_url") or "").partition(";base64,")
    if head.startswith("data:") and data:
        return {"type": "image", "mimeType": head.removeprefix("data:"), "data": data}
    text = part.get("text")
    return {"type": "text", "text": text if isinstance(text, str) else dump_json(part).decode()}
