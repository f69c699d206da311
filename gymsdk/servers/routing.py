"""The application of a server: FastAPI with a short path to the endpoints that take most of the load.

A request passes eight layers of FastAPI and Starlette before its endpoint runs, which costs more CPU time than many
endpoints. The POST endpoints of a server parse their bodies themselves and return finished responses, so they need
none of these layers. `ServerApp` looks their paths up in a dictionary. FastAPI still documents them in OpenAPI and
answers every other request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp

from gymsdk.servers.request_state import Receive, Scope, Send

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
"""Answers one request."""

ExceptionHandler: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]
"""Builds the response for an exception of an endpoint."""


class ServerApp(FastAPI):
    """A FastAPI application whose POST endpoints can be reached directly; see the module's description."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._endpoints: dict[str, Endpoint] = {}

    def add_post(self, path: str, endpoint: Endpoint, **documentation: Any) -> None:
        """Add an endpoint for POST requests.

        Args:
            path: The path, without parameters.
            endpoint: Answers a request. It parses the body itself.
            **documentation: Arguments of `add_api_route`, for the OpenAPI document.
        """
        self.add_api_route(path, endpoint, methods=["POST"], **documentation)
        # FastAPI answers with the first route of a path.
        self._endpoints.setdefault(path, endpoint)

    def build_middleware_stack(self) -> ASGIApp:
        """Build the stack: the server's own middleware, then the direct endpoints, then FastAPI's layers."""
        own, self.user_middleware = self.user_middleware, []
        try:
            layers = super().build_middleware_stack()
        finally:
            self.user_middleware = own
        if isinstance(layers, ServerErrorMiddleware):
            # An unknown error reaches the server's own middleware first, and then uvicorn, which answers with 500.
            layers = layers.app
        app: ASGIApp = _DirectEndpoints(layers, self._endpoints, self.exception_handlers)
        for middleware, arguments, options in reversed(own):
            app = middleware(app, *arguments, **options)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or the lifespan."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)


class _Route:
    """The route of a direct endpoint, as middleware finds it in the scope."""

    __slots__ = ("endpoint", "path")

    def __init__(self, path: str, endpoint: Endpoint) -> None:
        self.path = path
        self.endpoint = endpoint


class _DirectEndpoints:
    """An ASGI application that calls the endpoint of a path, and passes requests of other paths and methods on."""

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        handlers: Mapping[int | type[Exception], Callable[..., Any]],
    ) -> None:
        self._app = app
        self._routes = {path: _Route(path, endpoint) for path, endpoint in endpoints.items()}
        self._handlers: dict[type[Exception], ExceptionHandler] = {
            kind: handler for kind, handler in handlers.items() if isinstance(kind, type)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or the lifespan."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request, has_started = Request(scope, receive, send), False

        async def send_tracked(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            response = await route.endpoint(request)
            await response(scope, receive, send_tracked)
        except Exception as error:
            handler = self._find_handler(type(error))
            if handler is None or has_started:
                raise
            response = await handler(request, error)
            await response(scope, receive, send)

    def _find_handler(self, kind: type[Exception]) -> ExceptionHandler | None:
        return next((self._handlers[each] for each in kind.__mro__ if each in self._handlers), None)
