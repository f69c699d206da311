"""The models by name: `provider/name` becomes something that responds."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import SecretStr

from gymsdk import deadlines, responses, types
from gymsdk.deadlines import pause_deadline
from gymsdk.errors import BadModelOption, Failed, UnknownModel, convert_error, format_suggestion
from gymsdk.http.tls import split_addresses
from gymsdk.models.options import PROVIDERS, read_policy_variables
from gymsdk.models.options import validate_options as checked
from gymsdk.responses import Api
from gymsdk.threads import CrossLoopSemaphore
from gymsdk.types import Episode, Item, Model

REQUEST_OPTION_HINTS = {
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
        raise UnknownModel(f"no model named {name!r}{format_suggestion(provider, PROVIDERS)} (known: {known})")
    if provider == "scripted" and (base_url or api):
        raise BadModelOption(f"{name} plays here and has no address; name the model that is to play, as in vllm/NAME")
    if provider == "scripted" and (sent := next((each for each in REQUEST_OPTION_HINTS if options.get(each)), None)):
        raise BadModelOption(f"{name} plays here and is sent no request: {REQUEST_OPTION_HINTS[sent]}")
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
    named, base_url = split_addresses(address), given["base_url"]
    policys = split_addresses(base_url or ())
    if base_url is not None and not {*named} <= {*policys}:
        given = {"api_key": None}
        policys = ()
    known = {*policys, *split_addresses(read_policy_variables().policy_base_url or ())}
    return given | {"base_url": named, "apart": not {*named} <= known}


class MeteredModel:
    """*model* in the role of the config field *role*: at most *at_once* calls, *seconds* for each."""

    def __init__(self, model: Model, *, role: str, seconds: float = 120.0, at_once: int = 64) -> None:
        self.model = model
        self.role = role
        self._seconds = seconds
        self._free = CrossLoopSemaphore(at_once)

    def __repr__(self) -> str:
        return f"{self.role}={self.model!r}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request*; raises `Failed`, its kind beginning with `model_`, where no answer can be had."""
        with pause_deadline():
            await self._free.acquire()
            try:
                response = await self._asked(request, episode)
            except Failed as error:
                if error.kind.startswith("model_"):
                    raise
                raise convert_error(error, Failed, kind=f"model_{error.kind}") from error
            finally:
                self._free.release()
        types.record_usage(self.role, response)
        return response

    async def _asked(self, request: Item, episode: Episode | None) -> Item:
        who = f"the {self.role} model"
        try:
            async with asyncio.timeout(self._seconds):
                return await responses.query_model(self.model, request, episode=episode, label=who)
        except TimeoutError:
            message = f"{who} did not answer within {self._seconds:g} s"
            raise Failed(message, kind="model_timeout", retryable=True) from None
        except asyncio.CancelledError as error:
            if deadlines.get_deadline().get_remaining_seconds():
                raise
            # The hook that waits for this model ran out of time: the model is to blame, not the hook or the policy.
            message = f"{who} did not answer before the deadline of the hook or tool that asked it"
            raise Failed(message, kind="model_timeout", retryable=True) from error


class ReferencedModel:
    """The model of the model server *name*, which *find* returns on the first call.

    An environment is loaded before the models that it asks, and the servers of those may run in other processes.
    """

    def __init__(self, name: str, find: Callable[[], Model]) -> None:
        self.name = name
        self._find = find
        self._model: Model | None = None

    def __repr__(self) -> str:
        return f"<Referred {self.name!r}>"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response to *request*; raises `Failed` where there is none."""
        if self._model is None:
            self._model = self._find()
        return await self._model.respond(request, episode=episode)
