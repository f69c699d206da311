"""Own thoughts: what a hosted model is shown again of its reasoning, for it refuses what is not its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymsdk.transcript import Item
from gymsdk.turns import of_policy

from . import responses

MOST = 65_536
"""How many ids of thoughts are remembered: about eight megabytes of them."""


class Own:
    """Responses for a model that takes no thoughts but its own: those it encrypted, and those its provider keeps."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: dict[str, None] = {}

    def build_body(self, request: Item) -> Item:
        """Give the body to send, without the thoughts of others."""
        given = request.get("input")
        return responses.body(request | {"input": list(self._shown(given))} if isinstance(given, list) else request)

    def parse_answer(self, answer: Any, request: Item, *, strict: bool = False) -> Item:
        """Give the *answer* to *request* as a whole Response, and remember the thoughts in it."""
        response = responses.response(answer, request, strict=strict)
        # What a provider does not store it does not know by its id.
        if response.get("store", request.get("store")) is not False:
            self._remember(answer["output"])
        return response

    def _shown(self, items: list[Item]) -> Iterator[Item]:
        orphaned = False
        for item in items:
            if item.get("type") == "reasoning":
                orphaned = not (item.get("encrypted_content") or str(item.get("id")) in self._kept)
                if not orphaned:
                    yield item
                continue
            orphaned = orphaned and of_policy(item)
            # Under its id a provider asks for the thought that went before it.
            yield {key: value for key, value in item.items() if key != "id"} if orphaned else item

    def _remember(self, output: list[Item]) -> None:
        self._kept |= {str(item["id"]): None for item in output if item.get("type") == "reasoning" and item.get("id")}
        while len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)), None)
