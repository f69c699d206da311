"""A vLLM server at a base URL, asked in Chat Completions or in Responses.

It is always told temperature and top_p, 1.0 where the request does not say: vLLM would otherwise take them from the
model's `generation_config.json`, and trainers' servers refuse a request without.
"""

from __future__ import annotations

from gymsdk.models.endpoint import Endpoint
from gymsdk.models.options import ModelOptions, resolve_endpoint, resolve_model_name
from gymsdk.types import Model

SAMPLING = {"temperature": 1.0, "top_p": 1.0}
"""What it is asked with where nobody says otherwise."""


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = resolve_model_name("vllm", name)
    return Endpoint(known, resolve_endpoint(f"vllm/{known}", options), provider="vllm", defaults=SAMPLING)
