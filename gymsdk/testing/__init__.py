"""A scripted policy as an HTTP endpoint in place of an inference engine, with latency and faults on request."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymsdk.testing.endpoint import NAME, build_app, serve
    from gymsdk.testing.engine import Reasoning
    from gymsdk.testing.faults import NO_FAULT, Faults

__all__ = ["NAME", "NO_FAULT", "Faults", "Reasoning", "build_app", "serve"]

_MODULES = {"Faults": "faults", "NO_FAULT": "faults", "Reasoning": "engine"}


def __getattr__(name: str) -> Any:
    # The endpoint needs FastAPI, which the help of `gymsdk policy` would import with the faults.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'endpoint')}"), name)
