"""An upstream: one model behind the servers that serve it, asked in their dialect, its answer read as a Response."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pydantic import SecretStr

from gymsdk import http, reasons, wire
from gymsdk.addresses import public
from gymsdk.convert import keys, misfits
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.dialect import Dialect
from gymsdk.convert.dialect import dialect as spoken
from gymsdk.convert.extras import TEMPLATE
from gymsdk.discretion import discreet
from gymsdk.errors import Failed
from gymsdk.replicas import LOST, Final, Replicas, sticky
from gymsdk.settings import ModelOptions
from gymsdk.transcript import Item
from gymsdk.types import Episode

log = logging.getLogger("gymsdk")

STREAMED = ("stream", "stream_options")
"""What a call never says: its answer is read whole."""

CHAT = spoken("chat")
"""What a tokenizer is told a prompt in, whatever its engine is asked in."""

MISSING = 404
KEYLESS = frozenset({401, 403})

LOOK = 5.0
"""Seconds that a look at a server may take."""

ABSENT = frozenset({404, 405, 501})
"""How servers say that there is nothing at a path."""


class Post(Protocol):
    """Gives the answer to a body at a path; raises `Failed` where there is none by the deadline."""

    async def __call__(self, path: str, body: Item, *, sticky: str, deadline: float, final: Final) -> http.Answer: ...


class Upstream:
    """The model *name*, asked in *dialect* as *options* say; *defaults* are what is left open."""

    def __init__(
        self,
        name: str,
        options: ModelOptions,
        dialect: Dialect,
        *,
        defaults: Item | None = None,
        post: Post | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self._dialect = dialect
        self._defaults = defaults or {}
        self._post = post or _replicas(options).post
        self._told = False

    def __repr__(self) -> str:
        return f"{self.name}@{','.join(map(public, self.options.base_url or ()))}"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Give the answer to *request* as a Response; a prompt that does not fit makes it incomplete."""
        call = self._call(request, self._dialect, episode)
        return await self._read(await self._posted(self._dialect.path, call.body, call), call)

    async def count(self, request: Item) -> int | None:
        """Give how many tokens the prompt of *request* has, `None` where the server has no tokenizer that tells."""
        answer = await self._tokenized(self._call(request, CHAT))
        if answer.status in ABSENT:
            return None
        with discreet(*answer.secrets):
            told = await answer.json_async()
            size = told.get("count") if isinstance(told, dict) else None
            return size if isinstance(size, int) else None

    def _call(self, request: Item, dialect: Dialect, episode: Episode | None = None) -> _Call:
        asked = self._asked(request)
        deadline = asyncio.get_running_loop().time() + self.options.timeout
        body = self._body(asked, dialect)
        echoed = {key: body[key] for key in self._defaults if key in body}
        return _Call(asked | echoed, body, sticky(request, episode), deadline)

    async def _posted(self, path: str, body: Item, call: _Call) -> http.Answer:
        return await self._post(path, body, sticky=call.sticky, deadline=call.deadline, final=call.is_final)

    def _asked(self, request: Item) -> Item:
        """The request as the model is asked it, for a Response repeats that."""
        pinned = {key: value for key, value in self.options.pinned.items() if key in keys.RESPONSES}
        return request | {"model": self.name} | pinned

    def _body(self, asked: Item, dialect: Dialect) -> Item:
        options, body = self.options, dialect.build_body(asked)
        template = {**options.extra_body.get(TEMPLATE, {}), **options.chat_template_kwargs, **body.get(TEMPLATE, {})}
        whole = {**self._defaults, **options.extra_body, **body} | ({TEMPLATE: template} if template else {})
        asks = token_fields.ASKED if options.tokens else {}
        pinned = {key: value for key, value in options.pinned.items() if key not in dialect.translated_fields}
        sent = {**whole, **asks, **pinned}
        if sent.get("n") not in {None, 1}:
            raise Failed("one answer is read at a time; leave 'n' out of the request", kind="model_bad_request")
        return {key: value for key, value in sent.items() if value is not None and key not in STREAMED}

    async def _read(self, answer: http.Answer, call: _Call) -> Item:
        asked = call.asked
        if wire.overflowed(answer.status, answer.body):
            said, _ = reasons.refusal(answer.text)
            self._tell(f"{answer.host}: a prompt does not fit the model: {said}")
            return wire.overflow(said, model=asked["model"], request=asked)
        with discreet(*answer.secrets):
            self._check(answer, asked)
            told = await answer.json_async()
            wanted = token_fields.wanted(call.body)
            if wanted and "messages" in call.body and _lacks_prompt(told):
                told["prompt_token_ids"] = await self._prompt(call)
            response = self._dialect.parse_answer(told, asked, strict=wanted)
            if self.options.tokens:
                _check_tokens(response, answer.host)
            misfits.check(response, asked, host=answer.host)
            return response

    async def trouble(self) -> str | None:
        """Give what is wrong with one of the servers, as far as its list of models shows; `None` where nothing is."""
        found = await asyncio.gather(*map(self._looked_at, self.options.base_url or ()))
        return next(filter(None, found), None)

    async def _looked_at(self, url: str) -> str | None:
        key, who = self.options.api_key, f"the model's server at {http.host(url)}"
        bearer = {"Authorization": SecretStr(f"Bearer {key.get_secret_value()}")} if key else {}
        at = f"{url.rstrip('/')}/models"
        try:
            answer = await http.get(at, headers=bearer | dict(self.options.headers), timeout=LOOK, retry=http.ONCE)
        except Failed as error:
            why = str(error).removeprefix(f"cannot reach {http.host(url)}: ").removeprefix(f"{http.host(url)} ")
            return f"{who} does not answer yet: {why}"
        if answer.status in ABSENT and not _ends_right(url):
            return f"{who} has no models at {public(at)}; {_short(url)}"
        if answer.status in KEYLESS:
            return f"{who} answered {answer.status}; check the API key"
        return f"{who} does not answer yet: it answered {answer.status}" if answer.status in LOST else None

    def _tell(self, words: str) -> None:
        """Warn once: there may be many prompts that do not fit."""
        if not self._told:
            self._told = True
            log.warning("%s; such turns end at once, out of tokens: serve the model with more context", words)

    def _check(self, answer: http.Answer, asked: Item) -> None:
        """Raise a `Failed` that says more of a refusal than its status does."""
        if answer.ok:
            return
        said = f"{answer.host} answered {answer.status}: {reasons.refusal(answer.text)[0]}"
        if asked.get("tools") and (advice := misfits.mend(answer.text)):
            raise Failed(f"{said}; {advice}", kind="model_misconfigured")
        bare = [url for url in self.options.base_url or () if not _ends_right(url)]
        if answer.status == MISSING and bare:
            raise Failed(f"{said}; {_short(bare[0])}", kind="model_not_found")

    async def _prompt(self, call: _Call) -> object:
        """The ids of a call's prompt, by the tokenizer of the server."""
        answer = await self._tokenized(call)
        if answer.status in ABSENT:
            raise token_fields.bad(f"it has no ids of the prompt, and {answer.host} has no /tokenize that would tell")
        told = await answer.json_async()
        if not isinstance(told, dict) or not isinstance(told.get("tokens"), list):
            raise token_fields.bad(f"/tokenize of {answer.host} gave no list of tokens")
        return told["tokens"]

    async def _tokenized(self, call: _Call) -> http.Answer:
        prompt = {key: call.body[key] for key in token_fields.PROMPT if key in call.body}
        return await self._posted("/tokenize", prompt, call)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call while it is made: what was *asked*, its *body*, whose conversation it is of, by when."""

    asked: Item
    body: Item
    sticky: str
    deadline: float

    def is_final(self, answer: http.Answer) -> bool:
        """Whether an *answer* that is worth retrying by its status says that it will stay."""
        if wire.overflowed(answer.status, answer.body):
            return True
        return bool(self.asked.get("tools") and misfits.mend(answer.text))


class Endpoint:
    """The model *name* of a server, or of several that serve it, asked with *defaults* where nobody says otherwise.

    *provider* is what stands before its name.
    """

    def __init__(
        self, name: str, options: ModelOptions, *, provider: str = "endpoint", defaults: Item | None = None
    ) -> None:
        self.name = name
        self._provider = provider
        dialect = spoken(options.api or "chat", thoughts=options.thoughts or "field")
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
    return f"the base URL {public(url)} does not end in /v1, where such servers answer"


def _replicas(options: ModelOptions) -> Replicas:
    return Replicas(
        options.base_url or (),
        key=options.api_key,
        headers=options.headers,
        seconds=options.timeout,
        retry=http.Retry(times=options.retries, first=options.wait),
        largest=options.max_answer,
    )


def _lacks_prompt(told: object) -> bool:
    try:
        return isinstance(told, dict) and token_fields.lacks_prompt(told)
    except (LookupError, TypeError, AttributeError):
        # What is no completion is said to be none by who reads it.
        return False


def _check_tokens(response: Item, host: str) -> None:
    if not any(item.get(wire.TOKENS[1]) is not None for item in response["output"]):
        message = f"{host} sent no token ids, though it was asked for them"
        raise Failed(f"{message}; serve the model with vLLM, or do without --token-ids", kind="model_bad_tokens")
