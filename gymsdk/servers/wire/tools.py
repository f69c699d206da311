"""Tools over HTTP: `POST /<name>` calls one in the session's episode, and nothing but what that has on offer."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gymsdk.servers.app import Refused, arrived
from gymsdk.servers.door.routing import RESERVED
from gymsdk.servers.sessions.episodes import Episodes
from gymsdk.servers.sessions.held import Session
from gymsdk.servers.wire.documents import documented
from gymsdk.sitting import Taken
from gymsdk.transcript import Content, ToolCall
from gymsdk.values import parsed, written

STEP = "x-gymsdk-step"
"""The header that tells of a call what its output does not: what it paid, whether the episode is over."""

CLIENT = "x-gymsdk-client"
"""The header by which our own clients are known: what a policy has called brings its arguments, and no header."""

OTHERS = ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

log = logging.getLogger("gymsdk")


def route(made: FastAPI, episodes: Episodes) -> None:
    """Add the routes of the tools to *made*, after every other; warns of a tool that no route is left for."""
    tools, name = episodes.environment.tools, episodes.environment.name
    if hidden := sorted(RESERVED & tools.keys()):
        log.warning(
            "environment %r: tools named like an endpoint cannot be called over HTTP: %s; rename them, or have"
            " them called at /step or /mcp",
            name,
            ", ".join(hidden),
        )

    async def call(request: Request) -> Response:
        """Call this tool with the arguments in the body; the answer is its output, as the policy is to read it."""
        return await _called(request, episodes, request.path_params.get("tool", request.url.path.removeprefix("/")))

    async def missing(request: Request) -> Response:
        raise _no_tool(request)

    for each in _listed(tools.keys()):
        shape = tools[each].schema["parameters"]
        made.add_api_route(f"/{each}", call, methods=["POST"], name=each, **documented(shape, required=False))
    made.add_api_route("/{tool}", call, methods=["POST"], include_in_schema=False)
    made.add_api_route("/{tool}", missing, methods=OTHERS, include_in_schema=False)


def _listed(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in RESERVED]


async def _called(request: Request, episodes: Episodes, name: str) -> Response:
    session = episodes.sessions.find_by_token(request.scope["state"]["token"])
    if name in RESERVED or not _is_tool(name, episodes, session):
        if session is not None:
            session.calls.append(ToolCall(name=name, arguments=""))
        raise _no_tool(request)
    arguments = await _text(request)
    if session is not None:
        # Also a call that is refused below stands in the response of an agent.
        session.calls.append(ToolCall(name=name, arguments=arguments))
    async with episodes.lock_playing_session(session, "tools", "typed") as mine:
        output, taken = await episodes.call_tool(mine, name, arguments)
    return _output(output["output"], taken)


def _no_tool(request: Request) -> HTTPException:
    """Give what answers a request for which there is no tool: 405 where the path is another method's."""
    found = [each for each in request.app.routes if isinstance(each, Route) and each.path == request.url.path]
    methods = {method for each in found for method in each.methods or ()} - {"HEAD"}
    return HTTPException(405, headers={"allow": ", ".join(sorted(methods))}) if methods else HTTPException(404)


def _is_tool(name: str, episodes: Episodes, session: Session | None) -> bool:
    if name in episodes.environment.tools:
        return True
    episode = session.sitting.episode if session else None
    return episode is not None and any(tool["name"] == name for tool in episode.tools)


async def _text(request: Request) -> str:
    try:
        return (await arrived(request)).decode()
    except UnicodeDecodeError:
        raise Refused(422, "the body is no UTF-8 text") from None


def _output(output: Content, taken: Taken) -> Response:
    text = output.encode("utf-8", "replace") if isinstance(output, str) else written(output)
    answer = Response(text, media_type="application/json" if _is_json(text) else "text/plain")
    if taken.reward or taken.ended:
        answer.headers[STEP] = written({"reward": taken.reward, "done": taken.ended is not None}).decode()
    return answer


def _is_json(text: bytes) -> bool:
    try:
        parsed(text, strict=True)
    except ValueError:
        return False
    return True
