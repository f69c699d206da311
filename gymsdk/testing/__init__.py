"""A policy served over HTTP in the place of an engine, as slow, faulty and unreliable as it is told to be."""

from __future__ import annotations

from gymsdk.testing.endpoint import NAME, app, serve
from gymsdk.testing.engine import Reasoning
from gymsdk.testing.faults import SOUND, Faults

__all__ = ["NAME", "SOUND", "Faults", "Reasoning", "app", "serve"]
