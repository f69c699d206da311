"""The models by name: `provider/name` becomes something that responds."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import SecretStr

from gymsdk.addresses import several
from gymsdk.errors import BadModelOption, UnknownModel, suggestion
from gymsdk.settings import PROVIDERS, variables
from gymsdk.settings import options as checked
from gymsdk.types import Model
from gymsdk.wire import Api

ASKED = {
    "pinned": "there is nothing to pin anything in; leave out pinned (--pin)",
    "extra_body": "leave out extra_body",
    "chat_template_kwargs": "leave out chat_template_kwargs",
    "headers": "leave out headers",
    "tokens": "leave out tokens (--token-ids), or have token ids of it by `gymsdk policy serve`",
}
"""Options that are sent, and what to do where nothing is."""


def model(
    name: str,
    *,
    base_url: str | Sequence[str] | None = None,
    api: Api | None = None,
    timeout: float = 600.0,
    api_key: str | SecretStr | None = None,
    **options: Any,
) -> Model:
    """The model called *name*, as in `scripted/oracle`, `openai/gpt-5` or `vllm/Qwen/Qwen3-4B`.

    *base_url* and *api_key* default to the environment and the folder's `env.yaml`, *api* to the provider's own;
    *timeout* bounds a call with all its retries. Several addresses, as a list or separated by commas, are replicas of
    the model. Sampling belongs to the request. Further *options* are `retries`, `wait`, `max_answer`, `thoughts`,
    `pinned`, `extra_body`, `chat_template_kwargs`, `headers` and `tokens`. A name may carry the address of a server of
    its own, as in `vllm/NAME@http://HOST:PORT/v1`: it wins over *base_url*, and is not given its key.
    """
    name, address = _split(name)
    provider, _, rest = name.partition("/")
    if provider not in PROVIDERS:
        known = ", ".join(f"{one}/NAME" for one in PROVIDERS)
        raise UnknownModel(f"no model named {name!r}{suggestion(provider, PROVIDERS)} (known: {known})")
    if provider == "scripted" and (base_url or api):
        raise BadModelOption(f"{name} plays here and has no address; name the model that is to play, as in vllm/NAME")
    if provider == "scripted" and (sent := next((each for each in ASKED if options.get(each)), None)):
        raise BadModelOption(f"{name} plays here and is sent no request: {ASKED[sent]}")
    own = {"base_url": base_url, "api_key": api_key}
    given = (own if address is None else _apart(address, own)) | {"api": api, "timeout": timeout}
    module = importlib.import_module(f"gymsdk.models.{provider}")
    built: Model = module.build(rest, checked(name, given | options))
    return built


def _split(name: str) -> tuple[str, str | None]:
    """Give *name* without the address it carries, and the address; a scripted policy's name may be a path."""
    found = None if name.startswith("scripted/") else re.fullmatch(r"(.*)@(https?://.*)", name)
    return (found[1], found[2]) if found else (name, None)


def _apart(address: str, given: dict[str, Any]) -> dict[str, Any]:
    """Give the options for the servers at *address*: with a key only where that was given for the same addresses."""
    named, base_url = several(address), given["base_url"]
    policys = several(base_url or ())
    if base_url is not None and not {*named} <= {*policys}:
        given = {"api_key": None}
        policys = ()
    known = {*policys, *several(variables().policy_base_url or ())}
    return given | {"base_url": named, "apart": not {*named} <= known}
