"""A vLLM server at a base URL, asked in Chat Completions or in Responses.

It is always told temperature and top_p, 1.0 where the request does not say: vLLM would otherwise take them from the
model's `generation_config.json`, and trainers' servers refuse a request without.
"""

from __future__ import annotations

from gymsdk.settings import ModelOptions, named, reached
from gymsdk.types import Model
from gymsdk.upstream import Endpoint

SAMPLING = {"temperature": 1.0, "top_p": 1.0}
"""What it is asked with where nobody says otherwise."""


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = named("vllm", name)
    return Endpoint(known, reached(f"vllm/{known}", options), provider="vllm", defaults=SAMPLING)
