"""The models by name: `provider/name` becomes something that responds."""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import SecretStr

from gymsdk.errors import UnknownModel, suggestion
from gymsdk.settings import options as checked
from gymsdk.types import Model
from gymsdk.wire import Api

PROVIDERS = ("scripted", "openai", "vllm", "endpoint")


def model(
    name: str,
    *,
    base_url: str | None = None,
    api: Api | None = None,
    timeout: float = 600.0,
    api_key: str | SecretStr | None = None,
    **options: Any,
) -> Model:
    """The model called *name*, as in `scripted/oracle`, `openai/gpt-5` or `vllm/Qwen/Qwen3-4B`.

    *base_url* and *api_key* default to the environment and the folder's `env.yaml`, *api* to the provider's own;
    *timeout* bounds a call with all its retries. Sampling belongs to the request.
    """
    provider, _, rest = name.partition("/")
    if provider not in PROVIDERS:
        known = ", ".join(f"{one}/NAME" for one in PROVIDERS)
        raise UnknownModel(f"no model named {name!r}{suggestion(provider, PROVIDERS)} (known: {known})")
    given = {"base_url": base_url, "api": api, "timeout": timeout, "api_key": api_key}
    module = importlib.import_module(f"gymsdk.models.{provider}")
    built: Model = module.build(rest, checked(name, given | options))
    return built
