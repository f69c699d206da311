"""A scripted policy as an HTTP endpoint in place of an inference engine, with latency and faults on request."""

from __future__ import annotations

from gymsdk.testing.endpoint import NAME, app, serve
from gymsdk.testing.engine import Reasoning
from gymsdk.testing.faults import SOUND, Faults

__all__ = ["NAME", "SOUND", "Faults", "Reasoning", "app", "serve"]
