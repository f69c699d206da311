"""Any OpenAI-compatible server at a base URL, asked in Chat Completions or in Responses."""

from __future__ import annotations

from gymsdk.settings import ModelOptions, named, reached
from gymsdk.types import Model
from gymsdk.upstream import Endpoint


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = named("endpoint", name)
    return Endpoint(known, reached(f"endpoint/{known}", options))
