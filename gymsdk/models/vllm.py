"""A vLLM server at a base URL, queried with Chat Completions or Responses.

Requests always have temperature and top_p, by default 1.0. Without them vLLM would use the model's
`generation_config.json`, and the servers of trainers would reject the request.
"""

from __future__ import annotations

from gymsdk.models.endpoint import Endpoint
from gymsdk.models.options import ModelOptions, resolve_endpoint, resolve_model_name
from gymsdk.types import Model

SAMPLING = {"temperature": 1.0, "top_p": 1.0}
"""The sampling parameters of requests that do not set them."""


def build(name: str, options: ModelOptions) -> Model:
    """Return the model *name*, or that of the policy settings if it is empty, at the base URL of *options*."""
    resolved = resolve_model_name("vllm", name)
    return Endpoint(resolved, resolve_endpoint(f"vllm/{resolved}", options), provider="vllm", defaults=SAMPLING)
