"""Types of NeMo Gym's configuration."""

from __future__ import annotations

from pydantic import BaseModel

__all__ = ["BaseServerConfig"]


class BaseServerConfig(BaseModel):
    """The address of a server.

    Attributes:
        host: The host.
        port: The port.
        num_workers: The number of worker processes of NeMo Gym's servers; it has no effect here.
    """

    host: str
    port: int
    num_workers: int | None = None
