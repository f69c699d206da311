"""A vLLM server at a base URL, queried with Chat Completions or Responses.

With token ids, requests always have temperature and top_p, by default 1.0. vLLM would otherwise use those of the
model's `generation_config.json`, and report log-probabilities of another distribution than it samples. Without token
ids, the model's own defaults apply.
"""

from __future__ import annotations

from gymsdk.models.endpoint import Endpoint
from gymsdk.models.exact_tokens import SAMPLING
from gymsdk.models.options import ModelOptions, resolve_endpoint, resolve_model_name
from gymsdk.types import Model


def build(name: str, options: ModelOptions) -> Model:
    """Return the model *name*, or that of the policy settings if it is empty, at the base URL of *options*."""
    resolved = resolve_model_name("vllm", name)
    defaults = dict(SAMPLING) if options.tokens else None
    return Endpoint(resolved, resolve_endpoint(f"vllm/{resolved}", options), provider="vllm", defaults=defaults)
