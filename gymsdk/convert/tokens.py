"""Token ids and log-probabilities: where a completion has them, and whether what it has fits together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from types import MappingProxyType

import orjson

from gymsdk.errors import Failed
from gymsdk.transcript import Item
from gymsdk.wire import TOKENS

MARK = "token_id:"
"""What stands before an id that is given in the place of a token's text."""

ASKED = MappingProxyType(
    {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
)
"""What asks an engine for them."""

PROMPT = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "mm_processor_kwargs",
    "required_prefix_token_ids",
)
"""What of a chat body decides its prompt, and is all that a tokenizer is told."""

EXTRA = "routed_experts"
"""What some trainers' servers send beside the three."""

CARRIED = (*TOKENS, EXTRA)
"""What one item of a turn carries for the whole of it."""


def carried(items: Sequence[Item]) -> Item:
    """Give the token fields of a turn's *items*: the last that has them carries those of all."""
    carrier = next((item for item in reversed(items) if item.get(TOKENS[1]) is not None), {})
    return {key: carrier[key] for key in CARRIED if carrier.get(key) is not None}


def wanted(body: Item) -> bool:
    """Whether a chat *body* asks for ids and log-probabilities both."""
    return bool(body.get("logprobs")) and bool(body.get("return_token_ids") or body.get("return_tokens_as_token_ids"))


def bundle(completion: Item) -> Item:
    """Give the token fields of a chat *completion*: all three, or none.

    The message's own come first, then those beside it, then what stands in the place of the tokens' texts. Raises
    `Failed` where these disagree, some are missing, or they are not as many as their log-probabilities.
    """
    choice = completion["choices"][0]
    message, ids = choice["message"], _ids(choice)
    given = {key: message[key] for key in TOKENS if message.get(key) is not None}
    if given:
        if ids is not None and ids != given.get(TOKENS[1]):
            raise bad("those of its message differ from those beside it")
        return _checked(given) | ({EXTRA: message[EXTRA]} if message.get(EXTRA) is not None else {})
    if ids is None:
        return {}
    beside = {TOKENS[0]: _prompt(completion), TOKENS[1]: ids, TOKENS[2]: [each["logprob"] for each in _content(choice)]}
    return _checked({key: value for key, value in beside.items() if value is not None})


def lacks_prompt(completion: Item) -> bool:
    """Whether a chat *completion* has the ids of the answer, and not those of its prompt."""
    choice = completion["choices"][0]
    if any(choice["message"].get(key) is not None for key in TOKENS):
        return False
    return _prompt(completion) is None and (choice.get("token_ids") is not None or _are_spelled(_content(choice)))


def _prompt(completion: Item) -> list[int] | None:
    # SGLang has the prompt's ids by choice.
    given: list[int] | None = completion.get("prompt_token_ids")
    return completion["choices"][0].get("prompt_token_ids") if given is None else given


def _ids(choice: Item) -> list[int] | None:
    beside: list[int] | None = choice.get("token_ids")
    spelled = _spelled(_content(choice))
    if beside is not None and spelled is not None and beside != spelled:
        raise bad("its token_ids differ from the ids among its log-probabilities")
    return spelled if beside is None else beside


def _content(choice: Item) -> list[Item]:
    return (choice.get("logprobs") or {}).get("content") or []


def _are_spelled(content: list[Item]) -> bool:
    return bool(content) and str(content[0].get("token")).startswith(MARK)


def _spelled(content: list[Item]) -> list[int] | None:
    """The ids among *content*, `None` where it has texts: read as one list, for there may be many."""
    if not _are_spelled(content):
        return None
    words = "".join(map(itemgetter("token"), content))
    try:
        ids: list[int] = orjson.loads(f"[{words[len(MARK) :].replace(MARK, ',')}]")
    except orjson.JSONDecodeError:
        raise bad("some tokens of its log-probabilities are ids, and some are not") from None
    return ids


def check(item: Item) -> None:
    """Raise `Failed` where an output *item* has some of the token fields, or such as do not fit together."""
    found = {key: item[key] for key in TOKENS if item.get(key) is not None}
    if found:
        _checked(found)


def _checked(found: Item) -> Item:
    if missing := [key for key in TOKENS if key not in found]:
        raise bad(f"it has some of the token fields, and no {missing[0]}")
    prompt, ids, chances = (found[key] for key in TOKENS)
    if not all(isinstance(each, list) for each in found.values()):
        raise bad("its token fields are no lists")
    if len(ids) != len(chances):
        raise bad(f"it has {len(ids)} token ids and {len(chances)} log-probabilities")
    if not (_are_ids(ids) and _are_ids(prompt) and _are_numbers(chances)):
        raise bad("its token ids are no whole numbers, or its log-probabilities no numbers")
    return found


def _are_ids(values: list[object]) -> bool:
    # A sum walks the list in C, and is a whole number only where all its members are.
    return _are_numbers(values) and isinstance(sum(values), int)  # type: ignore[arg-type]  # what the line above found


def _are_numbers(values: list[object]) -> bool:
    try:
        return math.isfinite(sum(values))  # type: ignore[arg-type]  # that is what is being found out
    except TypeError:
        return False


def bad(what: str) -> Failed:
    """The failure of an answer whose tokens nobody can be trained on, since *what*."""
    return Failed(f"the tokens of the model's answer do not fit together: {what}", kind="model_bad_tokens")
