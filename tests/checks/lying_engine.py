"""Engines that lie about their tokens: a middleware that changes the answers of an engine, and a proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from gymsdk.convert.tokens import TOKEN_ID_PREFIX
from gymsdk.models.registry import model
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.testing.engine import EngineKind

JSON = dict[str, Any]
Change = Callable[[list[float]], list[float]]

LOGPROB_LIES: dict[str, Change] = {
    "halved": lambda values: [value / 2 for value in values],
    "2 lower": lambda values: [value - 2 for value in values],
    "shifted by one": lambda values: [*values[1:], values[0]] if len(values) > 1 else values,
    "all 0.0": lambda values: [0.0 for _ in values],
    "all -1.0": lambda values: [-1.0 for _ in values],
    "wrong from the second": lambda values: [*values[:1], *(1.5 * value - 0.5 for value in values[1:])],
}
"""The values that the engine reports for the log-probabilities of one generation."""

LIES = (
    *LOGPROB_LIES,
    *(f"{name}, scores too" for name in ("halved", "2 lower", "all 0.0", "all -1.0")),
    "ids of another tokenizer",
    "text of other ids",
)
"""The lies. With `scores too`, the log-probabilities of prompts have the same error."""

TOKENIZES_AGAIN = "tokenizes the prompt again"
"""The lie of a proxy: it returns the ids of a token prompt, and sends those of its text to the engine."""

KINDS: dict[str, EngineKind] = {
    "vllm-generate": "vllm",
    "vllm-completions": "vllm-completions",
    "sglang": "sglang",
    "nemo-rl": "nemo-rl",
    "chat": "vllm",
}
"""The kind of test engine for each token interface."""


def tell(lie: str, answer: JSON) -> None:
    """Change an *answer* of an engine as the *lie* says."""
    name = lie.removesuffix(", scores too")
    if name in LOGPROB_LIES:
        change_logprobs(answer, LOGPROB_LIES[name], scores=name != lie)
    for choice in answer.get("choices") or ():
        if lie == "ids of another tokenizer":
            change_ids(choice)
        if lie == "text of other ids":
            for holder, key in ((choice, "text"), (choice.get("message") or {}, "content")):
                if isinstance(holder.get(key), str):
                    holder[key] = holder[key][:-1] + "x"


def change_logprobs(answer: JSON, change: Change, *, scores: bool) -> None:
    for choice in answer.get("choices") or ():
        message, logprobs = choice.get("message") or {}, choice.get("logprobs") or {}
        if message.get("generation_log_probs"):
            message["generation_log_probs"] = change(message["generation_log_probs"])
        if logprobs.get("token_logprobs"):
            logprobs["token_logprobs"] = change(logprobs["token_logprobs"])
        if entries := logprobs.get("content"):
            for entry, value in zip(entries, change([entry["logprob"] for entry in entries]), strict=True):
                entry["logprob"] = value
        for entry in (choice.get("prompt_logprobs") or ()) if scores else ():
            for token in (entry or {}).values():
                token["logprob"] = change([token["logprob"]])[0]
    for entry in (answer.get("meta_info") or {}).get("input_token_logprobs", ())[1:] if scores else ():
        entry[0] = change([entry[0]])[0]


def change_ids(choice: JSON) -> None:
    """Replace the ids of letters by those of the next letters."""

    def move(token: int) -> int:
        return token + 1 if 32 <= token < 200 else token

    message, logprobs = choice.get("message") or {}, choice.get("logprobs") or {}
    for holder, key in ((choice, "token_ids"), (choice, "response_token_ids"), (message, "generation_token_ids")):
        if holder.get(key):
            holder[key] = [*map(move, holder[key])]
    if str((logprobs.get("tokens") or [""])[0]).startswith(TOKEN_ID_PREFIX):
        logprobs["tokens"] = [
            f"{TOKEN_ID_PREFIX}{move(int(token.removeprefix(TOKEN_ID_PREFIX)))}" for token in logprobs["tokens"]
        ]
    for entry in logprobs.get("content") or ():
        if str(entry.get("token")).startswith(TOKEN_ID_PREFIX):
            entry["token"] = f"{TOKEN_ID_PREFIX}{move(int(entry['token'].removeprefix(TOKEN_ID_PREFIX)))}"


def build_middleware(lie: str) -> Any:
    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        if request.method != "POST" or response.status != 200 or not isinstance(response, web.Response):
            return response
        answer = json.loads(response.body)  # type: ignore[arg-type]  # the body is bytes
        if isinstance(answer, dict):
            tell(lie, answer)
        return web.json_response(answer)

    return middleware


@asynccontextmanager
async def serve_lying_engine(interface: str, lie: str = "", *, pairs: bool = False) -> AsyncIterator[str]:
    """Serve the test engine for *interface* with a *lie*, empty for the truth, and yield its base URL."""
    app = build_app(model("scripted/oracle"), kind=KINDS[interface], pairs=pairs)
    if lie:
        app.middlewares.append(build_middleware(lie))
    async with serve(app) as url:
        yield url


@asynccontextmanager
async def serve_lying_proxy(engine: str, lie: str) -> AsyncIterator[str]:
    """Serve a proxy of the *engine* with a *lie*, and yield its base URL."""
    root = engine.removesuffix("/v1")
    # Without connections that the engine closes while a request is on its way.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def post(path: str, body: JSON) -> JSON:
            async with session.post(root + path, json=body) as answer:
                parsed: JSON = await answer.json()
                return parsed

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            headers = {"Content-Type": request.content_type}
            sent = json.loads(body) if request.path == "/v1/completions" and lie == TOKENIZES_AGAIN else {}
            if sent and "prompt_logprobs" not in sent:
                named = {"model": sent["model"], "add_special_tokens": False}
                text = await post("/detokenize", named | {"tokens": sent["prompt"]})
                again = await post("/tokenize", named | text)
                answer = await post(request.path, sent | {"prompt": again["tokens"]})
                answer["choices"][0]["prompt_token_ids"] = sent["prompt"]
                return web.json_response(answer)
            async with session.request(request.method, root + request.path, data=body, headers=headers) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

        app = web.Application(middlewares=[build_middleware(lie)] if lie else [], client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", forward)
        async with serve(app) as url:
            yield url
