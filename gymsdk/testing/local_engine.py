"""An engine without a server: a policy that writes in the chat template of any tokenizer.

It answers the same requests as vLLM's render, generate and derender, so that conversations with it pass through the
code that serves a real engine. The policy is usually scripted. Its texts are encoded in the way of a real policy: some
tokens are split into shorter ones, as the tokenizer itself would never do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextvars import ContextVar

from gymsdk import responses
from gymsdk.cluster.router import IsFinalAnswer
from gymsdk.convert import chat, chat_inbound
from gymsdk.convert.apis import get_outbound_api
from gymsdk.errors import UsageError
from gymsdk.http.backoff import Retries
from gymsdk.http.client import HttpResponse
from gymsdk.jsonl import dump_json
from gymsdk.models.endpoint import Upstream
from gymsdk.models.options import ModelOptions
from gymsdk.testing.engine import render_output
from gymsdk.tokens.bridge import Bridge, BridgeError, parse_call_arguments
from gymsdk.tokens.tokenizer import Tokenizer, get_eos_id, get_special_tokens, render_messages
from gymsdk.types import Episode, Item, Model

SPLIT_SHARE = 0.25
"""The share of tokens that a policy writes as two shorter ones."""

_current_call: ContextVar[tuple[Item, Episode | None]] = ContextVar("current_call")


class LocalModel:
    """A model that plays *policy* with the ids of *tokenizer*.

    Args:
        tokenizer: The tokenizer with the chat template.
        seed: Determines which tokens are split.
    """

    def __init__(self, policy: Model, tokenizer: Tokenizer, *, seed: int = 0) -> None:
        options = ModelOptions.model_validate(
            {"base_url": "http://local/v1", "tokens": True, "token_interface": "vllm-generate"}
        )
        engine = _LocalEngine(policy, tokenizer, random.Random(seed))
        self.name = "local"
        self._upstream = Upstream("local", options, get_outbound_api("chat"), post=engine.answer)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the policy's Response to *request*, with token ids."""
        token = _current_call.set((request, episode))
        try:
            return await self._upstream.respond(request, episode=episode)
        finally:
            _current_call.reset(token)

    async def tokenize(self, request: Item) -> list[int]:
        """Return the ids of the prompt of *request*, all of which the chat template renders."""
        return await self._upstream.tokenize(request)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*."""
        return await self._upstream.detokenize(ids)


class _LocalEngine:
    def __init__(self, policy: Model, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._rng = rng
        self._outputs: dict[str, list[Item]] = {}

    async def answer(
        self,
        path: str,
        body: Item,
        *,
        sticky: str,  # noqa: ARG002  # there are no replicas
        retries: Retries,  # noqa: ARG002  # nothing is retried
        is_final: IsFinalAnswer,  # noqa: ARG002  # nothing is retried
    ) -> HttpResponse:
        """Return the answer to *body* at *path*."""
        endpoints = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "chat/completions/render": self._render,
            "/inference/v1/generate": self._generate,
            "chat/completions/derender": self._derender,
        }
        try:
            return HttpResponse("the tokenizer", 200, dump_json(await endpoints[path](body)))
        except UsageError as error:
            return HttpResponse("the tokenizer", 400, dump_json({"error": {"message": str(error)}}))

    async def _tokenize(self, body: Item) -> Item:
        return {"tokens": self._render_ids(body)}

    async def _detokenize(self, body: Item) -> Item:
        return {"prompt": self._tokenizer.decode(body["tokens"])}

    async def _render(self, body: Item) -> Item:
        return {"token_ids": self._render_ids(body), "sampling_params": {}}

    async def _generate(self, body: Item) -> Item:
        request, episode = _current_call.get()
        response = await self._policy.respond(request, episode=episode)
        output: list[Item] = response["output"]
        request_id = responses.generate_id("chatcmpl")
        self._outputs[request_id] = output
        # Scripted policies have no probabilities; clients require a number for each token.
        ids = self._encode_turn(request, output)
        logprobs = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": logprobs}}
        return {"request_id": request_id, "choices": [choice], "prompt_token_ids": body["token_ids"]}

    async def _derender(self, body: Item) -> Item:
        output = self._outputs.pop(body["generate_response"]["request_id"])
        response = responses.build_response(output, model="local", usage=None)
        return chat_inbound.build_answer(response, {})

    def _render_ids(self, body: Item) -> list[int]:
        messages = [parse_call_arguments(message) for message in body["messages"]]
        add_generation_prompt = body.get("add_generation_prompt") is not False
        return render_messages(
            self._tokenizer, messages, tools=body.get("tools") or None, add_generation_prompt=add_generation_prompt
        )

    def _encode_turn(self, request: Item, output: list[Item]) -> list[int]:
        """Return ids of a turn as the template writes it, with some tokens split."""
        body = chat.build_body(request)
        turn = chat.build_messages({"input": output})
        prompt = self._render_ids(body)
        conversation_ids = self._render_ids(
            body | {"messages": [*body["messages"], *turn], "add_generation_prompt": False}
        )
        terminator = self._find_terminator(body.get("tools") or ())
        if (
            terminator is not None
            and conversation_ids[: len(prompt)] == prompt
            and terminator in conversation_ids[len(prompt) :]
        ):
            ids = conversation_ids[len(prompt) :]
            ids = ids[: len(ids) - ids[::-1].index(terminator) - 1]
        else:
            ids = list(self._tokenizer.encode(render_output(output), add_special_tokens=False))
        return [*self._split(ids), *([terminator] if terminator is not None else [])]

    def _find_terminator(self, tools: Sequence[Item]) -> int | None:
        try:
            return Bridge(self._tokenizer, tools).terminator
        except BridgeError:
            return get_eos_id(self._tokenizer)

    def _split(self, ids: Sequence[int]) -> list[int]:
        special = get_special_tokens(self._tokenizer)
        result: list[int] = []
        for token in ids:
            text = self._tokenizer.decode([token])
            if token in special or len(text) < 2 or self._rng.random() > SPLIT_SHARE:  # noqa: PLR2004  # two letters
                result.append(token)
                continue
            position = self._rng.randrange(1, len(text))
            parts = [
                self._tokenizer.encode(part, add_special_tokens=False) for part in (text[:position], text[position:])
            ]
            shorter_ids = [part for tokens in parts for part in tokens]
            # A token may hold part of a character: its halves then decode to another text.
            result += shorter_ids if self._tokenizer.decode(shorter_ids) == text else [token]
        return result
