"""The HTTP server of the viewer."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette

from gymsdk.studio.library import Library


class ViewerServer(uvicorn.Server):
    """Serves the viewer until a signal."""

    def __init__(self, app: Starlette, library: Library) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                proxy_headers=False,
                # Warnings are about requests that uvicorn refuses, which any page in the browser can send.
                log_level="error",
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._library = library

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams of the pages, which would otherwise be cut off, and then the connections."""
        self._library.interrupt()
        await super().shutdown(sockets)
