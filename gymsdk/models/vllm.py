"""A vLLM server at a base URL, asked in Chat Completions or in Responses.

It is always told temperature and top_p, 1.0 where the request does not say: vLLM would otherwise take them from the
model's `generation_config.json`, and trainers' servers refuse a request without.
"""

from __future__ import annotations

from gymsdk.convert.dialect import dialect
from gymsdk.settings import ModelOptions, named, reached
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model
from gymsdk.upstream import Upstream

SAMPLING = {"temperature": 1.0, "top_p": 1.0}
"""What it is asked with where nobody says otherwise."""


class Vllm:
    """The model *name* of a vLLM server, or of several that serve it."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.name = name
        spoken = dialect(options.api or "chat", thoughts=options.thoughts or "field")
        self._upstream = Upstream(name, options, spoken, defaults=SAMPLING)

    def __repr__(self) -> str:
        return f"vllm/{self._upstream!r}"

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


def build(name: str, options: ModelOptions) -> Model:
    """Give the model *name* at the base URL of *options*, or of the settings."""
    known = named("vllm", name)
    return Vllm(known, reached(f"vllm/{known}", options))
