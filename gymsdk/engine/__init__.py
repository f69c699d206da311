"""An engine: a vLLM of our own, which serves a model for as long as it is needed, and ends with us."""

from __future__ import annotations

from .command import Launch
from .launching import Engine, launched

__all__ = ["Engine", "Launch", "launched"]
