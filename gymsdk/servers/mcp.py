"""The `/mcp` endpoint: tools of a session over the Model Context Protocol.

See https://modelcontextprotocol.io/specification.

The transport is Streamable HTTP with one JSON response per request and no streams. A header with the session's key
names the session; the client gets the key when it opens the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from gymsdk.errors import EpisodeError
from gymsdk.jsonl import dump_json, parse_json
from gymsdk.servers.app import RequestRejected, document_endpoint, json_response, read_json_object
from gymsdk.servers.episodes import EpisodeService
from gymsdk.servers.sessions import Session
from gymsdk.types import Content, Item, ToolCall

TOKEN_HEADER = "X-NeMo-Gym-Session-Token"  # noqa: S105  # the name of a header
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


def build_access(server: str, key: str) -> Item:
    """Return how a client reaches the tools of the session with this key, as NeMo Gym's clients expect it."""
    return {"server_name": server, "url_path": "/mcp", "transport": "http", "headers": {TOKEN_HEADER: key}}


def strip_server_prefix(items: Sequence[Item], server: str) -> list[Item]:
    """Return items without the `mcp__SERVER__` prefix that MCP clients put before tool names."""
    prefix = f"mcp__{server}__"
    return [
        {**item, "name": name.removeprefix(prefix)}
        if item.get("type") == "function_call" and isinstance(name := item.get("name"), str)
        else item
        for item in items
    ]


def add_routes(app: FastAPI, episodes: EpisodeService, name: str) -> None:
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
        session = self._episodes.sessions.find_by_key(request.headers.get(TOKEN_HEADER))
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
            return _to_mcp_result(f"Missing {TOKEN_HEADER} for Gym MCP tool call.", failed=True)
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
        episode = session.runner.episode if session else None
        if episode is None:
            return [tool.schema for tool in self._episodes.environment.tools.values()]
        return episode.tools


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
