"""A provider of models with one defect each, and of one without: `build` is an entry point of `gymsdk.models`."""

from __future__ import annotations

import asyncio
from typing import Any

from gymsdk import Failed, responses
from gymsdk.errors import BadModelOption
from gymsdk.http import client
from gymsdk.models.options import ModelOptions
from gymsdk.types import Item


class Sound:
    """An adapter without a defect: it asks a server if it has an address, and answers with token ids if asked to."""

    takes_address = True
    has_tokens = True

    def __init__(self, options: ModelOptions) -> None:
        if options.base_url and not self.takes_address:
            raise BadModelOption("it runs in this process")
        if options.tokens and not self.has_tokens:
            raise BadModelOption("it has no token ids")
        self.options = options
        self.closed = 0

    async def respond(self, request: Item, *, episode: object = None) -> Item:
        if self.options.base_url:
            return await self.ask()
        await asyncio.sleep(0.01)
        return self.build(request)

    def build(self, request: Item) -> Item:
        item = responses.build_message("word")
        if self.options.tokens:
            earlier = [item for item in request["input"] if "prompt_token_ids" in item]
            prompt = [*earlier[-1]["prompt_token_ids"], *earlier[-1]["generation_token_ids"], 7] if earlier else [1, 2]
            item |= {"prompt_token_ids": prompt, "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
        return responses.build_response([item], model="sound")

    async def ask(self) -> Item:
        address, timeout = f"{self.options.base_url[0]}/responses", self.options.timeout
        answer = await client.post(address, {}, timeout=timeout, retry=client.NO_RETRY, key=self.options.api_key)
        if not answer.ok:
            retryable = answer.status in {429, 500}
            raise Failed(f"status {answer.status}", kind="model_error", retryable=retryable)
        body: Item = answer.json()
        return body

    async def aclose(self) -> None:
        self.closed += 1


class ChangesRequest(Sound):
    async def respond(self, request: Item, *, episode: object = None) -> Item:
        request["input"].append({"role": "user", "content": "x"})
        return await super().respond(request)


class ForgetsHistory(Sound):
    async def respond(self, request: Item, *, episode: object = None) -> Item:
        if len(request["input"]) > 1 and not self.options.base_url:
            raise KeyError("history")
        return await super().respond(request)


class NotJson(Sound):
    def build(self, request: Item) -> Item:
        return super().build(request) | {"usage": {"input_tokens": object()}}


class OneAtATime(Sound):
    running = False

    async def respond(self, request: Item, *, episode: object = None) -> Item:
        if self.running and not self.options.base_url:
            raise Failed("busy", kind="model_error")
        self.running = True
        try:
            return await super().respond(request)
        finally:
            self.running = False


class OneObject(Sound):
    cached: Any = None

    async def respond(self, request: Item, *, episode: object = None) -> Item:
        self.cached = self.cached or await super().respond(request)
        return self.cached  # type: ignore[no-any-return]


class RaisesOther(Sound):
    async def respond(self, request: Item, *, episode: object = None) -> Item:
        if not request["input"]:
            raise IndexError("list index out of range")
        return await super().respond(request)


class LeaksKey(Sound):
    async def ask(self) -> Item:
        try:
            return await super().ask()
        except Failed as error:
            key = self.options.api_key.get_secret_value() if self.options.api_key else ""
            raise Failed(f"{error} with {key}", kind=error.kind, retryable=error.retryable) from error


class AlwaysRetryable(Sound):
    async def ask(self) -> Item:
        try:
            return await super().ask()
        except Failed as error:
            raise Failed(str(error), kind=error.kind, retryable=True) from error


class NeverRetryable(Sound):
    async def ask(self) -> Item:
        try:
            return await super().ask()
        except Failed as error:
            raise Failed(str(error), kind=error.kind) from error


class HidesErrors(Sound):
    async def ask(self) -> Item:
        try:
            return await super().ask()
        except Failed:
            return responses.build_response([], model="x", status="incomplete")


class DropsId(Sound):
    def build(self, request: Item) -> Item:
        response = super().build(request)
        if self.options.tokens:
            response["output"][-1]["generation_token_ids"] = [3]
        return response


class NoLogprobs(Sound):
    def build(self, request: Item) -> Item:
        response = super().build(request)
        response["output"][-1].pop("generation_log_probs", None)
        return response


class PositiveLogprob(Sound):
    def build(self, request: Item) -> Item:
        response = super().build(request)
        if self.options.tokens:
            response["output"][-1]["generation_log_probs"] = [0.5, -0.1]
        return response


class BreaksChain(Sound):
    def build(self, request: Item) -> Item:
        response = super().build(request)
        if self.options.tokens and len(request["input"]) > 1:
            response["output"][-1]["prompt_token_ids"] = [1, 2, 9]
        return response


class SwallowsCancel(Sound):
    async def respond(self, request: Item, *, episode: object = None) -> Item:
        try:
            return await super().respond(request)
        except asyncio.CancelledError:
            return self.build(request)


class SwallowsCancelInProcess(SwallowsCancel):
    takes_address = False


class ConvertsCancel(Sound):
    async def respond(self, request: Item, *, episode: object = None) -> Item:
        try:
            return await super().respond(request)
        except asyncio.CancelledError:
            raise Failed("stopped", kind="model_error") from None


class HangsAtClose(Sound):
    async def aclose(self) -> None:
        if self.options.base_url is None:
            await asyncio.sleep(60)


class ClosesOnce(Sound):
    async def aclose(self) -> None:
        await super().aclose()
        if self.closed > 1:
            raise RuntimeError("closed already")


class LeavesTask(Sound):
    async def respond(self, request: Item, *, episode: object = None) -> Item:
        self.task = asyncio.ensure_future(asyncio.sleep(0.5))
        return await super().respond(request)


class WithoutClose(Sound):
    aclose = None  # type: ignore[assignment]


class InProcess(Sound):
    takes_address = False
    has_tokens = False


def build(name: str, options: ModelOptions) -> Any:
    return globals()[name](options)
