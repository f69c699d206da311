"""Tokenizing: text and conversations as ids and back, by the routes of vLLM."""

from __future__ import annotations

from gymsdk.convert.faces import chat
from gymsdk.convert.faces.face import Malformed
from gymsdk.errors import UsageError
from gymsdk.transcript import Item

from . import prompts
from .prompts import BYTES


def tokenized(body: Item, *, context: int | None) -> Item:
    """Give the ids of the `prompt`, or of the `messages`, in *body*; raises `Malformed`."""
    ids = _ids(body)
    spelled = [BYTES.decode([token]) for token in ids] if body.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": spelled}


def detokenized(body: Item) -> Item:
    """Give the text of the `tokens` in *body*; raises `Malformed`."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise Malformed("'tokens' must be a list of token ids", "tokens")
    try:
        return {"prompt": BYTES.decode(tokens)}
    except UsageError as error:
        raise Malformed(str(error), "tokens") from error


def _ids(body: Item) -> list[int]:
    if "messages" not in body:
        if not isinstance(body.get("prompt"), str):
            raise Malformed("give a 'prompt', which is a text, or 'messages'", "prompt")
        return BYTES.encode(body["prompt"])
    # Read as what it would be asked as, so that what is malformed there is so here.
    chat.request({"messages": body["messages"], "tools": body.get("tools")})
    open_ended = bool(body.get("continue_final_message"))
    prompted = not open_ended and body.get("add_generation_prompt") is not False
    try:
        ids = prompts.of_chat(body).ids(add_generation_prompt=prompted)
    except UsageError as error:
        raise Malformed(str(error), "messages") from error
    # Without the end of the turn and its line break the policy goes on with the last message.
    return ids[:-2] if open_ended else ids
