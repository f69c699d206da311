"""Any OpenAI-compatible server at a base URL, asked in Chat Completions or in Responses."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pydantic import SecretStr

from gymsdk import responses
from gymsdk.convert import api, chat
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.apis import OutboundApi, get_outbound_api
from gymsdk.convert.chat import CHAT_TEMPLATE_KEY
from gymsdk.credentials import redact_failures
from gymsdk.errors import Failed
from gymsdk.http import client, errors
from gymsdk.http.tls import redact_url
from gymsdk.models.options import ModelOptions, resolve_endpoint, resolve_model_name
from gymsdk.router import UNAVAILABLE_STATUSES, IsFinalAnswer, ReplicaRouter, get_sticky_key
from gymsdk.types import Episode, Item, Model

log = logging.getLogger("gymsdk")

STREAM_FIELDS = ("stream", "stream_options")
"""What a call never says: its answer is read whole."""

CHAT_COMPLETIONS = get_outbound_api("chat")
"""What a tokenizer is told a prompt in, whatever its engine is asked in."""

NOT_FOUND = 404
UNAUTHORIZED_STATUSES = frozenset({401, 403})

CHECK_SECONDS = 5.0
"""Seconds that a look at a server may take."""

UNSUPPORTED_STATUSES = frozenset({404, 405, 501})
"""How servers say that there is nothing at a path."""


class Transport(Protocol):
    """Gives the answer to a body at a path; raises `Failed` where there is none by the deadline."""

    async def __call__(
        self, path: str, body: Item, *, sticky: str, deadline: float, final: IsFinalAnswer
    ) -> client.HttpResponse: ...


class Upstream:
    """The model *name*, asked in *dialect* as *options* say; *defaults* are what is left open."""

    def __init__(
        self,
        name: str,
        options: ModelOptions,
        dialect: OutboundApi,
        *,
        defaults: Item | None = None,
        post: Transport | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self._dialect = dialect
        self._defaults = defaults or {}
        self._post = post or _replicas(options).post
        self._told = False

    def __repr__(self) -> str:
        return f"{self.name}@{','.join(map(redact_url, self.options.base_url or ()))}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Give the answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        call = self._call(request, self._dialect, episode)
        return await self._read(await self._posted(self._dialect.path, call.body, call), call)

    async def count(self, request: Item) -> int | None:
        """Give how many tokens the prompt of *request* has, `None` where the server has no tokenizer that tells."""
        answer = await self._tokenized(self._call(request, CHAT_COMPLETIONS))
        if answer.status in UNSUPPORTED_STATUSES:
            return None
        with redact_failures(*answer.secrets):
            told = await answer.json_async()
            size = told.get("count") if isinstance(told, dict) else None
            return size if isinstance(size, int) else None

    def _call(self, request: Item, dialect: OutboundApi, episode: Episode | None = None) -> _Call:
        asked = self._asked(request)
        deadline = asyncio.get_running_loop().time() + self.options.timeout
        body = self._body(asked, dialect)
        echoed = {key: body[key] for key in self._defaults if key in body}
        return _Call(asked | echoed, body, get_sticky_key(request, episode), deadline)

    async def _posted(self, path: str, body: Item, call: _Call) -> client.HttpResponse:
        return await self._post(path, body, sticky=call.sticky, deadline=call.deadline, final=call.is_final)

    def _asked(self, request: Item) -> Item:
        """The request as the model is asked it, for a Response repeats that."""
        pinned = {key: value for key, value in self.options.pinned.items() if key in chat.RESPONSES_FIELDS}
        return request | {"model": self.name} | pinned

    def _body(self, asked: Item, dialect: OutboundApi) -> Item:
        options, body = self.options, dialect.build_body(asked)
        template = {
            **options.extra_body.get(CHAT_TEMPLATE_KEY, {}),
            **options.chat_template_kwargs,
            **body.get(CHAT_TEMPLATE_KEY, {}),
        }
        whole = {**self._defaults, **options.extra_body, **body} | ({CHAT_TEMPLATE_KEY: template} if template else {})
        asks = token_fields.TOKEN_REQUEST_FIELDS if options.tokens else {}
        pinned = {key: value for key, value in options.pinned.items() if key not in dialect.translated_fields}
        sent = {**whole, **asks, **pinned}
        if sent.get("n") not in {None, 1}:
            raise Failed("one answer is read at a time; leave 'n' out of the request", kind="model_bad_request")
        return {key: value for key, value in sent.items() if value is not None and key not in STREAM_FIELDS}

    async def _read(self, answer: client.HttpResponse, call: _Call) -> Item:
        asked = call.asked
        if responses.is_context_overflow(answer.status, answer.body):
            said, _ = errors.parse_refusal(answer.text)
            self._tell(f"{answer.host}: a prompt does not fit the model: {said}")
            return responses.build_overflow_response(said, model=asked["model"], request=asked)
        with redact_failures(*answer.secrets):
            self._check(answer, asked)
            told = await answer.json_async()
            wanted = token_fields.wants_tokens(call.body)
            if wanted and "messages" in call.body and _lacks_prompt(told):
                told["prompt_token_ids"] = await self._prompt(call)
            response = self._dialect.parse_answer(told, asked, strict=wanted)
            if self.options.tokens:
                _check_tokens(response, answer.host)
            api.check_unparsed_calls(response, asked, host=answer.host)
            return response

    async def trouble(self) -> str | None:
        """Give what is wrong with one of the servers, as far as its list of models shows; `None` where nothing is."""
        found = await asyncio.gather(*map(self._looked_at, self.options.base_url or ()))
        return next(filter(None, found), None)

    async def _looked_at(self, url: str) -> str | None:
        key, who = self.options.api_key, f"the model's server at {client.get_host(url)}"
        bearer = {"Authorization": SecretStr(f"Bearer {key.get_secret_value()}")} if key else {}
        at = f"{url.rstrip('/')}/models"
        try:
            answer = await client.get(
                at, headers=bearer | dict(self.options.headers), timeout=CHECK_SECONDS, retry=client.NO_RETRY
            )
        except Failed as error:
            why = (
                str(error)
                .removeprefix(f"cannot reach {client.get_host(url)}: ")
                .removeprefix(f"{client.get_host(url)} ")
            )
            return f"{who} does not answer yet: {why}"
        if answer.status in UNSUPPORTED_STATUSES and not _ends_right(url):
            return f"{who} has no models at {redact_url(at)}; {_short(url)}"
        if answer.status in UNAUTHORIZED_STATUSES:
            return f"{who} answered {answer.status}; check the API key"
        return (
            f"{who} does not answer yet: it answered {answer.status}" if answer.status in UNAVAILABLE_STATUSES else None
        )

    def _tell(self, words: str) -> None:
        """Warn once: there may be many prompts that do not fit."""
        if not self._told:
            self._told = True
            log.warning("%s; such turns end at once, out of tokens: serve the model with more context", words)

    def _check(self, answer: client.HttpResponse, asked: Item) -> None:
        """Raise a `Failed` that says more of a refusal than its status does."""
        if answer.ok:
            return
        said = f"{answer.host} answered {answer.status}: {errors.parse_refusal(answer.text)[0]}"
        if asked.get("tools") and (advice := api.suggest_tool_fix(answer.text)):
            raise Failed(f"{said}; {advice}", kind="model_misconfigured")
        bare = [url for url in self.options.base_url or () if not _ends_right(url)]
        if answer.status == NOT_FOUND and bare:
            raise Failed(f"{said}; {_short(bare[0])}", kind="model_not_found")

    async def _prompt(self, call: _Call) -> object:
        """The ids of a call's prompt, by the tokenizer of the server."""
        answer = await self._tokenized(call)
        if answer.status in UNSUPPORTED_STATUSES:
            raise token_fields.build_bad_tokens_error(
                f"it has no ids of the prompt, and {answer.host} has no /tokenize that would tell"
            )
        told = await answer.json_async()
        if not isinstance(told, dict) or not isinstance(told.get("tokens"), list):
            raise token_fields.build_bad_tokens_error(f"/tokenize of {answer.host} gave no list of tokens")
        return told["tokens"]

    async def _tokenized(self, call: _Call) -> client.HttpResponse:
        prompt = {key: call.body[key] for key in token_fields.PROMPT_FIELDS if key in call.body}
        return await self._posted("/tokenize", prompt, call)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call while it is made: what was *asked*, its *body*, whose conversation it is of, by when."""

    asked: Item
    body: Item
    sticky: str
    deadline: float

    def is_final(self, answer: client.HttpResponse) -> bool:
        """Whether an *answer* that is worth retrying by its status says that it will stay."""
        if responses.is_context_overflow(answer.status, answer.body):
            return True
        return bool(self.asked.get("tools") and api.suggest_tool_fix(answer.text))


class Endpoint:
    """The model *name* of a server, or of several that serve it, asked with *defaults* where nobody says otherwise.

    *provider* is what stands before its name.
    """

    def __init__(
        self, name: str, options: ModelOptions, *, provider: str = "endpoint", defaults: Item | None = None
    ) -> None:
        self.name = name
        self._provider = provider
        dialect = get_outbound_api(options.api or "chat", thoughts=options.thoughts or "field")
        self._upstream = Upstream(name, options, dialect, defaults=defaults)

    def __repr__(self) -> str:
        return f"{self._provider}/{self._upstream!r}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Give the server's answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        return await self._upstream.respond(request, episode=episode)

    async def count(self, request: Item) -> int | None:
        """Give how many tokens the prompt of *request* has, `None` where the server cannot tell."""
        return await self._upstream.count(request)

    async def trouble(self) -> str | None:
        """Give what is wrong with one of its servers, `None` where nothing can be seen."""
        return await self._upstream.trouble()

    async def aclose(self) -> None:
        """Nothing to release: connections are shared, and close with the event loop."""


def _ends_right(url: str) -> bool:
    return url.rstrip("/").endswith("/v1")


def _short(url: str) -> str:
    return f"the base URL {redact_url(url)} does not end in /v1, where such servers answer"


def _replicas(options: ModelOptions) -> ReplicaRouter:
    return ReplicaRouter(
        options.base_url or (),
        key=options.api_key,
        headers=options.headers,
        seconds=options.timeout,
        retry=client.Retry(times=options.retries, first=options.wait),
        largest=options.max_answer,
    )


def _lacks_prompt(told: object) -> bool:
    try:
        return isinstance(told, dict) and token_fields.lacks_prompt_ids(told)
    except (LookupError, TypeError, AttributeError):
        # What is no completion is said to be none by who reads it.
        return False


def _check_tokens(response: Item, host: str) -> None:
    if not any(item.get(responses.TOKEN_FIELDS[1]) is not None for item in response["output"]):
        message = f"{host} sent no token ids, though it was asked for them"
        raise Failed(f"{message}; serve the model with vLLM, or do without --token-ids", kind="model_bad_tokens")


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = resolve_model_name("endpoint", name)
    return Endpoint(known, resolve_endpoint(f"endpoint/{known}", options))
