"""A scripted policy as an HTTP endpoint in place of an inference engine, with latency and faults on request."""

from __future__ import annotations

from gymsdk.testing.endpoint import NAME, build_app, serve
from gymsdk.testing.engine import Reasoning
from gymsdk.testing.faults import NO_FAULT, Faults

__all__ = ["NAME", "NO_FAULT", "Faults", "Reasoning", "build_app", "serve"]
