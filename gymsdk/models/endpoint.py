"""Any OpenAI-compatible server at a base URL, queried with Chat Completions or Responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from gymsdk import responses
from gymsdk.cluster.router import UNAVAILABLE_STATUSES, IsFinalAnswer, ReplicaClient, get_sticky_key
from gymsdk.convert import api, chat
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.apis import COMPLETIONS, OutboundApi, get_outbound_api
from gymsdk.convert.chat import CHAT_TEMPLATE_KEY
from gymsdk.convert.late_system import has_late_system, is_role_refusal, move_late_system
from gymsdk.convert.request_keys import RESPONSES_KEYS, build_bad_key_error
from gymsdk.convert.responses import INPUT_TOKENS_KEYS, INPUT_TOKENS_PATH, RESPONSES_PATH
from gymsdk.convert.token_limits import find_limit_refusal
from gymsdk.credentials import redact_failures
from gymsdk.errors import Failed
from gymsdk.http import client, errors
from gymsdk.http.backoff import Retries
from gymsdk.http.tls import redact_url
from gymsdk.models import token_settings
from gymsdk.models.disguised import reveal_error
from gymsdk.models.engine_calls import OUTPUT_LIMITS, Call, OutputLimitRefused, build_limit_error, refuses_role
from gymsdk.models.exact_tokens import ExactTokens
from gymsdk.models.options import ModelOptions, resolve_endpoint, resolve_model_name
from gymsdk.models.token_calls import EngineRefusal, TokenCall, build_no_ids_error, relax_tools
from gymsdk.once import OnceLogger
from gymsdk.responses import TokenInterface
from gymsdk.types import Episode, Item, Model

log = logging.getLogger("gymsdk")

STREAM_FIELDS = ("stream", "stream_options")
"""Fields that are never sent: answers are read as a whole."""

CHAT_COMPLETIONS = get_outbound_api("chat")
"""The API for requests to `/tokenize`, even if the model is queried with Responses."""

NOT_FOUND = 404
UNSUPPORTED_STATUSES = frozenset({404, 405, 501})
"""The statuses with which servers answer at a path that they do not support."""

CHECK_SECONDS = 5.0
"""The timeout of a check whether a server is up."""


class Transport(Protocol):
    """Sends a body to a path and returns the answer; raises `Failed` if there is none."""

    async def __call__(
        self, path: str, body: Item, *, sticky: str, retries: Retries, is_final: IsFinalAnswer
    ) -> client.HttpResponse: ...


class Upstream:
    """Queries a model on its servers: builds the body, sends it, and parses and checks the answer.

    Args:
        name: The name of the model on the servers.
        options: How to query them.
        outbound_api: The API that they offer.
        defaults: Fields of the body that neither the request nor the options set.
        post: Sends requests; by default to the replicas of the options.
    """

    def __init__(
        self,
        name: str,
        options: ModelOptions,
        outbound_api: OutboundApi,
        *,
        defaults: Item | None = None,
        post: Transport | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self._api = outbound_api
        self._defaults = defaults or {}
        # Null removes any key of the request, also one that would be refused.
        pinned = {key: value for key, value in options.pinned.items() if key in RESPONSES_KEYS or value is None}
        self._effective_fields = {"model": name} | pinned
        self._adds_fields = bool(defaults or options.extra_body or options.tokens or options.pinned)
        self._replicas = _build_client(options)
        self._post = post or self._replicas.post
        # A server that an SDK queries has only the paths of that SDK.
        self._has_tokenizer = post is None
        is_native = outbound_api.path == RESPONSES_PATH
        thoughts = options.thoughts or ("field" if post is None else "drop")
        responses_api = outbound_api if is_native else get_outbound_api("responses", thoughts=thoughts)
        self._count_api = replace(responses_api, path=INPUT_TOKENS_PATH, is_forwarded=True)
        self._once = OnceLogger(log)
        self._moves_system = False
        self._retry = options.retry
        self._exact_tokens: ExactTokens | None = None
        if options.tokens and outbound_api.path == chat.CHAT_PATH:
            self._exact_tokens = ExactTokens(name, options.token_interface, options.tokenizer)

    def __repr__(self) -> str:
        return f"{self.name}@{','.join(map(redact_url, self.options.base_url or ()))}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the Response to *request*; if the prompt exceeds the context, an incomplete one.

        Raises:
            Failed: There is no valid answer within the timeout.
        """
        return await self._respond(self._prepare_call(request, self._api, episode))

    async def complete(self, body: Item) -> Item:
        """Return the server's answer to the *body* of a Completions request.

        If the prompt exceeds the context, return an incomplete Response.

        Raises:
            Failed: There is no valid answer within the timeout; `model_cannot_complete` if the server lacks this API.
        """
        return await self._respond(self._prepare_call(body, COMPLETIONS))

    async def _respond(self, call: Call) -> Item:
        while True:
            try:
                response = await self._query(call)
            except OutputLimitRefused as refused:
                # Each time with a smaller limit, or at last without one.
                call = self._clamp(call, refused)
            except Failed as error:
                if self._is_late_system_refusal(call, error):
                    self._once.warn(
                        "%s; gymsdk sends the system messages after the first messages as user messages", error
                    )
                    # Later calls are prepared like this if the call succeeds.
                    call = replace(call, body=move_late_system(call.body), moves_system=True)
                elif not (call.is_answered and error.retryable and await self._wait_to_retry(call, str(error))):
                    raise
            else:
                self._moves_system = self._moves_system or call.moves_system
                return response

    async def _query(self, call: Call) -> Item:
        """Return the Response to *call*.

        Raises:
            Failed: There is no valid answer.
            OutputLimitRefused: The output limit does not fit beside the prompt, and another one may.
        """
        if self._exact_tokens is not None and not call.api.is_forwarded:
            return await self._respond_with_exact_tokens(call, self._exact_tokens)
        answer = await self._send(call.api.path, call.body, call)
        return await self._parse_answer(answer, call)

    def _is_late_system_refusal(self, call: Call, error: Failed) -> bool:
        if call.moves_system or not has_late_system(call.body):
            return False
        # With a tokenizer, the template is in this process.
        return call.refuses_role or (error.kind == "model_bad_request" and is_role_refusal(str(error)))

    def _clamp(self, call: Call, refused: OutputLimitRefused) -> Call:
        """Return *call* with the largest output limit that fits; without one, the engine generates as far as it can."""
        room = refused.refusal.remaining_tokens
        self._once.warn(
            "%s: an output limit does not fit into the context of the model: %s; gymsdk asks again with the largest"
            " limit that fits; lower --max-output-tokens, or serve the model with a longer context",
            refused.host,
            refused.refusal.message,
        )
        limits = OUTPUT_LIMITS & call.body.keys()
        others = {key: value for key, value in call.body.items() if key not in limits}
        body = others if room is None else others | dict.fromkeys(limits, room)
        return replace(call, body=body)

    async def _respond_with_exact_tokens(self, call: Call, exact_tokens: ExactTokens) -> Item:
        token_call = self._build_token_call(call)
        try:
            completion, prompt = await exact_tokens.respond(token_call)
        except EngineRefusal as refusal:
            return await self._parse_answer(refusal.answer, call)
        response = self._api.parse_answer(completion, call.request, strict=True)
        _check_has_tokens(response, self.name)
        exact_tokens.finish(response, token_call, prompt)
        _add_weight_versions(response, completion)
        api.check_unparsed_calls(response, call.request, host=self.name)
        return response

    def _build_token_call(self, call: Call) -> TokenCall:
        async def send(path: str, body: Item) -> client.HttpResponse:
            return await self._send(path, body, call)

        thoughts = self.options.thoughts or "field"
        return TokenCall(call.request, relax_tools(call.body), send, thoughts, moves_system=call.moves_system)

    async def count_running(self) -> int | None:
        """Return the number of calls at the engine, `None` if the engine does not tell."""
        return await self._replicas.count_running() if self._has_tokenizer else None

    async def count(self, request: Item) -> int | None:
        """Return the number of tokens in the prompt of *request*, `None` if the server cannot count them."""
        answer = await self._tokenize(self._prepare_call(request, CHAT_COMPLETIONS))
        if answer.status in UNSUPPORTED_STATUSES:
            return None
        with redact_failures(*answer.secrets):
            body = await answer.json_async()
            count = body.get("count") if isinstance(body, dict) else None
            return count if isinstance(count, int) else None

    async def count_input(self, request: Item) -> int | None:
        """Return the number of tokens in the input of *request*, `None` if the server cannot count them.

        `/tokenize` counts the prompt of a chat, and a server with the Responses API counts the input as it gets it.
        """
        ways = [self.count, self._ask_for_count] if self._has_tokenizer else [self._ask_for_count]
        for count in ways if self._api.path == chat.CHAT_PATH else reversed(ways):
            if (tokens := await count(request)) is not None:
                return tokens
        return None

    async def _ask_for_count(self, request: Item) -> int | None:
        """Return the number of tokens that the server's own count of a Responses request gives, if it has one."""
        call = self._prepare_call(request, self._count_api)
        body = {key: value for key, value in call.body.items() if key in INPUT_TOKENS_KEYS}
        answer = await self._send(INPUT_TOKENS_PATH, body, call)
        if answer.status in UNSUPPORTED_STATUSES:
            return None
        with redact_failures(*answer.secrets):
            counted = await answer.json_async()
            tokens = counted.get("input_tokens") if isinstance(counted, dict) else None
            return tokens if isinstance(tokens, int) else None

    async def tokenize(self, request: Item) -> list[int]:
        """Return the token ids of the prompt of *request*, all of which the server's chat template renders.

        Raises:
            Failed: The server has no `/tokenize`.
        """
        answer = await self._tokenize(self._prepare_call(request, CHAT_COMPLETIONS))
        return token_fields.check_ids((await answer.json_async()).get("tokens"), "/tokenize")

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token *ids*.

        Raises:
            Failed: The server has no `/detokenize`.
        """
        call = self._prepare_call({"input": "text"}, CHAT_COMPLETIONS)
        answer = await self._send("/detokenize", {"model": self.name, "tokens": [*ids]}, call)
        return str((await answer.json_async()).get("prompt"))

    async def trouble(self) -> str | None:
        """Ask each server for its models; return a sentence about the first problem, `None` if there is none."""
        problems = await asyncio.gather(*map(self._check_server, self.options.base_url or ()))
        if problem := next(filter(None, problems), None):
            return problem
        try:
            await self.check_tokens()
        except Failed as error:
            return str(error)
        return None

    async def check_tokens(self) -> TokenInterface | None:
        """Return how the servers take and return token ids, `None` if they are not wanted.

        Raises:
            Failed: The servers return no token ids (`model_no_token_ids`), or they do not answer.
        """
        exact_tokens = self._exact_tokens
        if exact_tokens is None:
            return None
        call = self._prepare_call({"input": "probe"}, self._api)
        try:
            return exact_tokens.interface or await exact_tokens.detect(self._build_token_call(call))
        except EngineRefusal as refusal:
            await self._parse_answer(refusal.answer, call)
            raise

    def get_sampling(self, requested: Item) -> Item:
        """Return the sampling parameters that the servers get for a request with the parameters *requested*."""
        defaults = {**(self._exact_tokens.sampling if self._exact_tokens else {}), **self._defaults}
        body = {**defaults, **self.options.extra_body, **requested, **self.options.pinned}
        return {key: value for key, value in body.items() if value is not None and token_settings.is_sampling_key(key)}

    def build_probe_call(self) -> TokenCall:
        """Return a call with which checks send their own requests to the servers."""
        return self._build_token_call(self._prepare_call({"input": "probe"}, self._api))

    def _prepare_call(self, request: Item, outbound_api: OutboundApi, episode: Episode | None = None) -> Call:
        effective = request | self._effective_fields
        body = self._build_body(effective, outbound_api)
        moves_system = self._moves_system and has_late_system(body)
        if moves_system:
            body = move_late_system(body)
        # The Response repeats the fields of its request, defaults included.
        defaults = {key: body[key] for key in self._defaults if key in body}
        sticky_key = get_sticky_key(request, episode)
        retries = self._retry.start()
        return Call(effective | defaults, body, sticky_key, retries, outbound_api, moves_system=moves_system)

    def _build_body(self, request: Item, outbound_api: OutboundApi) -> Item:
        options, body = self.options, outbound_api.build_body(request)
        complete = body if outbound_api.is_forwarded else self._add_template(body)
        # Most models have no such options, and then a copy of the body is not needed.
        if self._adds_fields:
            has_tokens = options.tokens and not outbound_api.is_forwarded
            tokens = token_fields.TOKEN_REQUEST_FIELDS if has_tokens else {}
            pinned = {key: value for key, value in options.pinned.items() if key not in outbound_api.translated_fields}
            complete = {**self._defaults, **options.extra_body, **complete}
            if has_tokens:
                token_settings.check_fields({**complete, **pinned})
            complete = {**complete, **tokens, **pinned}
        if not outbound_api.is_forwarded and complete.get("n") not in (None, 1):
            raise build_bad_key_error("n", "'n' must be 1: a model returns one answer; leave 'n' out")
        for limit in OUTPUT_LIMITS & complete.keys():
            # vLLM gives the same message for such a request as for a prompt that fills the context.
            # A completion without tokens, as with `echo`, is up to the engine.
            if complete[limit] == 0 and not outbound_api.is_forwarded:
                raise build_bad_key_error(limit, f"{limit!r} must be at least 1")
        return {key: value for key, value in complete.items() if value is not None and key not in STREAM_FIELDS}

    def _add_template(self, body: Item) -> Item:
        """Return *body* with the variables of the chat template; those of the request override those of the model."""
        options, requested = self.options, body.get(CHAT_TEMPLATE_KEY, {})
        if not isinstance(requested, dict):
            raise build_bad_key_error(CHAT_TEMPLATE_KEY, f"{CHAT_TEMPLATE_KEY!r} must be a JSON object")
        template = {**options.extra_body.get(CHAT_TEMPLATE_KEY, {}), **options.chat_template_kwargs, **requested}
        return body | {CHAT_TEMPLATE_KEY: template} if template else body

    async def _send(self, path: str, body: Item, call: Call) -> client.HttpResponse:
        """Return the answer to *body* at *path*; an error, a page or a broken body with status 200 is tried again."""
        while True:
            call.is_answered = call.refuses_role = False
            answer = await self._post(path, body, sticky=call.sticky_key, retries=call.retries, is_final=call.is_final)
            call.is_answered = answer.ok
            revealed, is_faulty = reveal_error(answer)
            call.refuses_role = refuses_role(revealed)
            if not is_faulty:
                return revealed
            reason = f"{answer.host} answered {answer.status} with {answer.text[: errors.MAX_EXCERPT_CHARS]!r}"
            if not await self._wait_to_retry(call, reason):
                return revealed

    async def _wait_to_retry(self, call: Call, reason: str) -> bool:
        """Wait before another try of a *call* with an answer that cannot be used; return whether there is one.

        Requests without an answer are repeated by the client of the replicas, or by the SDK.
        """
        delay = call.retries.take()
        if delay is None:
            return False
        self._once.warn("trying again, up to %d times per call: %s", self._retry.times, reason)
        await asyncio.sleep(delay)
        return True

    async def _parse_answer(self, answer: client.HttpResponse, call: Call) -> Item:
        request = call.request
        if (refusal := find_limit_refusal(answer.status, answer.body)) is not None:
            message, _ = errors.parse_refusal(answer.text)
            # Some servers take -1 for "no limit". Others give the message of a prompt that fills the context.
            negative = [name for name in OUTPUT_LIMITS if isinstance(limit := call.body.get(name), int) and limit < 0]
            if negative:
                raise build_bad_key_error(negative[0], f"{negative[0]!r} must be at least 1: {message}")
            refusal = replace(refusal, message=message)
            if not refusal.is_prompt:
                raise build_limit_error(answer, call, refusal)
            self._once.warn(
                "%s: a prompt exceeds the context of the model: %s; such turns end at once, truncated by tokens;"
                " serve the model with a longer context",
                answer.host,
                message,
            )
            return responses.build_overflow_response(message, model=request["model"], request=request)
        with redact_failures(*answer.secrets):
            self._check_status(answer, call)
            # A model's answer has no integers beyond 64 bits, and may have 100,000 log-probabilities.
            body = await answer.json_async(exact=False)
            response = call.api.parse_answer(body, request, strict=token_fields.wants_tokens(call.body))
            if call.api.is_forwarded:
                return response
            if self.options.tokens:
                _check_has_tokens(response, self.name)
                response["output"][-1].update(token_settings.get_marks(call.body))
            _add_weight_versions(response, body)
            api.check_unparsed_calls(response, request, host=answer.host)
            return response

    def _check_status(self, answer: client.HttpResponse, call: Call) -> None:
        """Raise a specific error for statuses with a known cause; the general ones are raised on reading the body."""
        if answer.ok:
            return
        reason, param = errors.parse_refusal(answer.text)
        message = f"{answer.host} answered {answer.status}: {reason}"
        if call.request.get("tools") and (advice := api.suggest_tool_fix(answer.text)):
            raise Failed(f"{message}; {advice}", kind="model_misconfigured")
        without_v1 = [url for url in self.options.base_url or () if not _ends_in_v1(url)]
        if answer.status == NOT_FOUND and without_v1:
            raise Failed(f"{message}; {_suggest_v1(without_v1[0])}", kind="model_not_found")
        if call.api.is_forwarded and answer.status in UNSUPPORTED_STATUSES and param != "model":
            advice = f"the engine has no /v1/{call.api.path}; send a chat completion"
            raise Failed(f"{message}; {advice}", kind="model_cannot_complete")

    async def _tokenize(self, call: Call) -> client.HttpResponse:
        # With token ids, the engine gets the same prompt as from the calls.
        body = relax_tools(call.body) if self.options.tokens else call.body
        prompt = {key: body[key] for key in token_fields.PROMPT_FIELDS if key in body}
        return await self._send("/tokenize", prompt, call)

    async def _check_server(self, url: str) -> str | None:
        host = client.get_host(url)
        server = f"the model's server at {host}"
        models_url = f"{url.rstrip('/')}/models"
        try:
            answer = await client.get(
                models_url,
                key=self.options.api_key,
                headers=self.options.headers,
                timeout=CHECK_SECONDS,
                retry=client.NO_RETRY,
            )
        except Failed as error:
            reason = str(error).removeprefix(f"cannot reach {host}: ").removeprefix(f"{host} ")
            return f"{server} does not answer yet: {reason}"
        if answer.status in UNSUPPORTED_STATUSES and not _ends_in_v1(url):
            return f"{server} has no models at {redact_url(models_url)}; {_suggest_v1(url)}"
        if answer.status in {401, 403}:
            return f"{server} answered {answer.status}; check the API key"
        if answer.status in UNAVAILABLE_STATUSES:
            return f"{server} does not answer yet: it answered {answer.status}"
        return None


class Endpoint(Upstream):
    """A model that one server, or several replicas, offer through an OpenAI-compatible API.

    Args:
        name: The name of the model on the server.
        options: The base URLs and how to query them.
        provider: The provider in the model's name.
        defaults: Fields of the request body that neither the request nor the options set.
    """

    def __init__(
        self, name: str, options: ModelOptions, *, provider: str = "endpoint", defaults: Item | None = None
    ) -> None:
        self._provider = provider
        # vLLM and SGLang ignore the keys that they do not know; other servers may refuse a request because of them.
        passes_unknown = provider == "vllm" or options.token_interface == "sglang"  # noqa: S105 - an interface
        outbound_api = get_outbound_api(
            options.api or "chat", thoughts=options.thoughts or "field", passes_unknown=passes_unknown
        )
        super().__init__(name, options, outbound_api, defaults=defaults)

    def __repr__(self) -> str:
        return f"{self._provider}/{super().__repr__()}"

    async def aclose(self) -> None:
        """Do nothing: connections are shared and close with the event loop."""


def build(name: str, options: ModelOptions) -> Model:
    """Return the model *name*, or that of the policy settings if it is empty, at the base URL of *options*."""
    resolved = resolve_model_name("endpoint", name)
    return Endpoint(resolved, resolve_endpoint(f"endpoint/{resolved}", options))


def _ends_in_v1(url: str) -> bool:
    return url.rstrip("/").endswith("/v1")


def _suggest_v1(url: str) -> str:
    return f"the base URL {redact_url(url)} does not end in /v1, as it does for most servers"


def _build_client(options: ModelOptions) -> ReplicaClient:
    return ReplicaClient(
        options.base_url or (),
        key=options.api_key,
        headers=options.headers,
        seconds=options.timeout,
        largest=options.max_answer,
    )


def _add_weight_versions(response: Item, answer: Item) -> None:
    """Copy the versions of the engine's weights from *answer* to the last item of *response*, if there is one."""
    if response["output"]:
        response["output"][-1].update(token_fields.parse_weight_versions(answer))


def _check_has_tokens(response: Item, name: str) -> None:
    if not any(item.get(responses.TOKEN_FIELDS[1]) is not None for item in response["output"]):
        raise build_no_ids_error(name)
