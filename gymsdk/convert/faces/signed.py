"""Signed thoughts: reasoning items as thinking blocks, whose signature carries what a block has no place for."""

from __future__ import annotations

from typing import Any

from gymsdk import values, wire
from gymsdk.convert.tokens import CARRIED
from gymsdk.transcript import Item

from . import shape

SUMMARY, CONTENT = "summary", "content"
"""Where a reasoning item has its texts: servers are divided over it."""

PARTS = {SUMMARY: "summary_text", CONTENT: "reasoning_text"}


def blocks(item: Item) -> list[Item]:
    """Give a thinking block for each text of a reasoning *item*, or one redacted block where it has none."""
    shown = CONTENT if item.get(CONTENT) and not item.get(SUMMARY) else SUMMARY
    texts = item.get(shown) or []
    signature = _signature(item, shown)
    if not texts:
        return [{"type": "redacted_thinking", "data": signature}]
    if isinstance(texts, str):
        texts = [{"text": texts}]
    return [{"type": "thinking", "thinking": part.get("text") or "", "signature": signature} for part in texts]


def item(thinking: list[Item], where: str) -> Item | None:
    """Give the reasoning item that blocks of one signature amount to, `None` where nobody here could read it."""
    if thinking[0]["type"] == "redacted_thinking":
        kept = _kept(thinking[0].get("data"))
        # What somebody else has encrypted says nothing to the model behind us.
        return None if kept is None else {"type": "reasoning", SUMMARY: []} | kept
    texts = [shape.text(block, "thinking", where) for block in thinking]
    kept = _kept(thinking[0].get("signature"))
    if kept is None:
        return wire.reasoning(*texts)
    shown = CONTENT if SUMMARY in kept else SUMMARY
    return {"type": "reasoning"} | kept | {shown: [{"type": PARTS[shown], "text": text} for text in texts]}


def _signature(item: Item, shown: str) -> str:
    """Everything else that *item* holds; a summary in it says that the texts are those of the content."""
    kept = {key: value for key, value in item.items() if key not in {"type", shown, *CARRIED}}
    if "id" not in kept:
        kept["id"] = wire.fresh("rs")
    if shown == CONTENT:
        kept.setdefault(SUMMARY, [])
    return values.written(kept).decode()


def _kept(signature: Any) -> Item | None:
    """What a *signature* of ours holds."""
    if not isinstance(signature, str) or not signature.startswith("{"):
        return None
    try:
        kept = values.parsed(signature.encode())
    except ValueError:
        return None
    return kept if isinstance(kept, dict) and isinstance(kept.get("id"), str) else None
