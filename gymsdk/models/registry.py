"""Build models from names such as `openai/gpt-5`, and bound and record the calls that environments make."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from pydantic import SecretStr

from gymsdk import responses
from gymsdk.concurrency import INTERRUPTS, CrossLoopSemaphore
from gymsdk.config.show import redact_settings
from gymsdk.config.yaml import map_values
from gymsdk.credentials import redact
from gymsdk.episode_record import MAX_CALL_BYTES, get_recorded_stage
from gymsdk.errors import (
    BadModelOption,
    BrokenPlugin,
    EpisodeError,
    Failed,
    GymsdkError,
    UnknownModel,
    convert_error,
    describe_exception,
    format_name,
    format_suggestion,
)
from gymsdk.http.tls import split_addresses
from gymsdk.jsonl import dump_json, dump_portable_json, parse_json
from gymsdk.models.options import DEFAULT_TIMEOUT_SECONDS, ModelOptions, read_policy_variables, validate_options
from gymsdk.plugins.calls import get_deadline, pause_deadline
from gymsdk.responses import Api, record_usage
from gymsdk.types import Episode, Item, Model


class Provider(Protocol):
    """An entry of the group `gymsdk.models`: a function that returns a model."""

    def __call__(self, name: str, options: ModelOptions, /) -> Model:
        """Return the model *name*, which is the part of a model's name after the provider and the slash.

        Raises:
            UnknownModel: There is no such model.
            BadModelOption: An option is missing, or the provider does not support it.
        """


REQUEST_OPTION_HINTS = {
    "pinned": "leave out pinned (--pin)",
    "extra_body": "leave out extra_body",
    "chat_template_kwargs": "leave out chat_template_kwargs",
    "headers": "leave out headers",
    "token_interface": "leave out token_interface (--token-interface)",
    "tokenizer": "leave out tokenizer (--tokenizer)",
    "tokens": "leave out tokens (--token-ids), or serve the policy with `gymsdk policy serve` to get token ids",
}
"""Options that change the HTTP request, and what to do for a scripted policy, which sends none."""


def model(
    name: str,
    *,
    base_url: str | Sequence[str] | None = None,
    api: Api | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    api_key: str | SecretStr | None = None,
    **options: Any,
) -> Model:
    """Return the model called *name*.

    Sampling parameters belong to the request, not to the model.

    Args:
        name: `provider/name`, as in `scripted/oracle`, `openai/gpt-5` or `vllm/Qwen/Qwen3-4B`. A name may contain the
            base URL of its server, as in `vllm/NAME@http://HOST:PORT/v1`. It takes precedence over *base_url*, and
            that server does not receive the key of *base_url*.
        base_url: The base URL. Several, as a list or separated by commas, are replicas of the model. The default
            comes from environment variables and the `env.yaml` of the working folder.
        api: `chat` or `responses`; the default depends on the provider.
        timeout: The seconds that one call may take, with all its retries.
        api_key: The API key, with the same default as *base_url*.
        **options: Further fields of `ModelOptions`: `retries`, `wait`, `max_answer`, `thoughts`, `pinned`,
            `extra_body`, `chat_template_kwargs`, `headers`, `tokens`, `token_interface` and `tokenizer`.

    Raises:
        UnknownModel: There is no such provider or scripted policy.
        BadModelOption: An option is invalid or missing.
    """
    name, address = _split_address(name)
    provider, _, rest = name.partition("/")
    build = _load_provider(provider, name)
    if provider == "scripted" and (base_url or api):
        raise BadModelOption(f"{name} runs in this process and has no address; name a model to query, as in vllm/NAME")
    unused = next((option for option in REQUEST_OPTION_HINTS if options.get(option)), None)
    if provider == "scripted" and unused is not None:
        raise BadModelOption(f"{name} runs in this process and sends no requests: {REQUEST_OPTION_HINTS[unused]}")
    endpoint = {"base_url": base_url, "api_key": api_key}
    if address is not None:
        endpoint = _use_address(address, endpoint)
    return build(rest, validate_options(name, endpoint | {"api": api, "timeout": timeout} | options))


def _load_provider(provider: str, name: str) -> Provider:
    """Return the provider of the model *name*; its errors that are none of gymsdk's name it.

    Raises:
        UnknownModel: There is no such provider.
        BrokenPlugin: The provider cannot be imported.
    """
    # Imported here: environments import this module, and most of them have no model.
    from gymsdk.plugins import registry

    entry = registry.find_entry(registry.MODELS, provider)
    if entry is None:
        if registry.is_hidden(provider):
            raise UnknownModel(f"provider {provider!r} is hidden by GYMSDK_DISABLE; remove it from that variable")
        providers = [entry.name for entry in registry.list_entries(registry.MODELS)]
        known = ", ".join(f"{provider_name}/NAME" for provider_name in providers)
        raise UnknownModel(
            f"no model named {format_name(name)!r}{format_suggestion(provider, providers)} (known: {known})"
        )

    def build(rest: str, options: ModelOptions) -> Model:
        provide = registry.load_entry(entry)
        if not callable(provide):
            raise BrokenPlugin(f"{entry.title}: {entry.module} is no function that returns a model")
        try:
            built: Model = provide(rest, options)
        except (GymsdkError, *INTERRUPTS):
            raise
        except BaseException as error:
            raise BrokenPlugin(f"{entry.title} raised {describe_exception(error)}") from error
        responses.check_model(built)
        return built

    return build


def _split_address(name: str) -> tuple[str, str | None]:
    """Split *name* into the name and the address in it; the name of a scripted policy may be a path with an `@`."""
    match = None if name.startswith("scripted/") else re.fullmatch(r"(.*)@(https?://.*)", name)
    return (match[1], match[2]) if match else (name, None)


def _use_address(address: str, endpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the options for the servers at *address*, with the key of *endpoint* only if it is for these servers."""
    addresses, base_url = split_addresses(address), endpoint["base_url"]
    policy_addresses = split_addresses(base_url or ())
    if base_url is not None and not {*addresses} <= {*policy_addresses}:
        endpoint = {"api_key": None}
        policy_addresses = ()
    known = {*policy_addresses, *split_addresses(read_policy_variables().policy_base_url or ())}
    return endpoint | {"base_url": addresses, "apart": not {*addresses} <= known}


RECORDED_ANSWER_FIELDS = ("id", "model", "status", "incomplete_details", "output", "usage")
"""The fields of a response that are recorded for a call of an environment; others repeat the request."""


class MeteredModel:
    """A model for an environment, with bounded time and concurrency, that records its calls and their tokens by role.

    Args:
        model: The model.
        role: The configuration field that names the model, such as `judge`.
        seconds: The time that one call may take.
        concurrency: The number of concurrent calls.

    Attributes:
        secrets: Texts that no record of a call may contain.
    """

    def __init__(self, model: Model, *, role: str, seconds: float = 120.0, concurrency: int = 64) -> None:
        self.model = model
        self.role = role
        self.secrets: Collection[SecretStr] = ()
        self._seconds = seconds
        self._semaphore = CrossLoopSemaphore(concurrency)

    def __repr__(self) -> str:
        return f"{self.role}={self.model!r}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the Response to *request*.

        Raises:
            Failed: There is no answer. The kind starts with `model_`.
        """
        stage = get_recorded_stage()
        if stage is None:
            return await self._respond(request, episode)
        started = time.perf_counter()
        # Redacted before the call: the environment may change the request meanwhile.
        call = {"role": self.role, **stage.describe(), "request": self._redact(request)}
        try:
            response = await self._respond(request, episode)
            answer = {name: response[name] for name in RECORDED_ANSWER_FIELDS if name in response}
            call["answer"] = self._redact(answer)
        except BaseException as error:
            kind = error.kind if isinstance(error, EpisodeError) else type(error).__name__
            call["error"] = self._redact({"kind": kind, "message": str(error)})
            raise
        finally:
            call["seconds"] = round(time.perf_counter() - started, 6)
            stage.add_call(call, len(dump_portable_json(call)))
        return response

    async def _respond(self, request: Item, episode: Episode | None) -> Item:
        with pause_deadline():
            await self._semaphore.acquire()
            try:
                response = await self._query(request, episode)
            except Failed as error:
                if error.kind.startswith("model_"):
                    raise
                raise convert_error(error, Failed, kind=f"model_{error.kind}") from error
            finally:
                self._semaphore.release()
        record_usage(self.role, response)
        return response

    def _redact(self, value: Item) -> Item:
        """Return a copy of *value* without secrets: texts under secret keys, credentials in URLs, and known secrets."""
        options = getattr(self.model, "options", None)
        secrets = [*self.secrets, *(options.secrets if isinstance(options, ModelOptions) else ())]
        try:
            data = dump_json(value, replace_surrogates=True, default=str)
            if len(data) > MAX_CALL_BYTES:
                return {"left_out": f"{len(data):,} bytes"}
            redacted: Item = map_values(
                lambda _, part: redact(part, secrets) if isinstance(part, str) else part,
                redact_settings(parse_json(data)),
            )
        except (TypeError, ValueError, RecursionError) as error:
            # The call itself may succeed all the same.
            return {"left_out": str(error)}
        return redacted

    async def _query(self, request: Item, episode: Episode | None) -> Item:
        label = f"the {self.role} model"
        try:
            async with asyncio.timeout(self._seconds):
                return await responses.query_model(self.model, request, episode=episode, label=label)
        except TimeoutError:
            message = f"{label} did not answer within {self._seconds:g} s"
            raise Failed(message, kind="model_timeout", retryable=True) from None
        except asyncio.CancelledError as error:
            if get_deadline().get_remaining_seconds():
                raise
            # The hook ran out of time while it waited for the model: the model is at fault, not the hook or the policy.
            message = f"{label} did not answer before the deadline of the hook or tool that called it"
            raise Failed(message, kind="model_timeout", retryable=True) from error


class ReferencedModel:
    """The model behind a model server of the deployment, found on the first call.

    An environment is loaded before the models that it uses, and their servers may run in other processes.

    Args:
        name: The name of the model server.
        find: Returns the model.
    """

    def __init__(self, name: str, find: Callable[[], Model]) -> None:
        self.name = name
        self._find = find
        self._model: Model | None = None

    def __repr__(self) -> str:
        return f"<ReferencedModel {self.name!r}>"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's Response to *request*."""
        if self._model is None:
            self._model = self._find()
        return await self._model.respond(request, episode=episode)
