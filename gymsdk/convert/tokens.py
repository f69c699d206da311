"""Token ids and log-probabilities: where a completion has them, and whether what it has fits together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from types import MappingProxyType

import orjson

from gymsdk.errors import Failed
from gymsdk.responses import TOKEN_FIELDS
from gymsdk.types import Item

TOKEN_ID_PREFIX = "token_id:"
"""What stands before an id that is given in the place of a token's text."""

TOKEN_REQUEST_FIELDS = MappingProxyType(
    {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
)
"""What asks an engine for them."""

PROMPT_FIELDS = (
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

ROUTED_EXPERTS = "routed_experts"
"""What some trainers' servers send beside the three."""

CARRIED_FIELDS = (*TOKEN_FIELDS, ROUTED_EXPERTS)
"""What one item of a turn carries for the whole of it."""


def get_carried_fields(items: Sequence[Item]) -> Item:
    """Give the token fields of a turn's *items*: the last that has them carries those of all."""
    carrier = next((item for item in reversed(items) if item.get(TOKEN_FIELDS[1]) is not None), {})
    return {key: carrier[key] for key in CARRIED_FIELDS if carrier.get(key) is not None}


def wants_tokens(body: Item) -> bool:
    """Whether a chat *body* asks for ids and log-probabilities both."""
    return bool(body.get("logprobs")) and bool(body.get("return_token_ids") or body.get("return_tokens_as_token_ids"))


def parse_token_fields(completion: Item) -> Item:
    """Give the token fields of a chat *completion*: all three, or none.

    The message's own come first, then those beside it, then what stands in the place of the tokens' texts. Raises
    `Failed` where these disagree, some are missing, or they are not as many as their log-probabilities.
    """
    choice = completion["choices"][0]
    message, ids = choice["message"], _ids(choice)
    given = {key: message[key] for key in TOKEN_FIELDS if message.get(key) is not None}
    if given:
        if ids is not None and ids != given.get(TOKEN_FIELDS[1]):
            raise build_bad_tokens_error("those of its message differ from those beside it")
        return _checked(given) | (
            {ROUTED_EXPERTS: message[ROUTED_EXPERTS]} if message.get(ROUTED_EXPERTS) is not None else {}
        )
    if ids is None:
        return {}
    beside = {
        TOKEN_FIELDS[0]: _prompt(completion),
        TOKEN_FIELDS[1]: ids,
        TOKEN_FIELDS[2]: [each["logprob"] for each in _content(choice)],
    }
    return _checked({key: value for key, value in beside.items() if value is not None})


def lacks_prompt_ids(completion: Item) -> bool:
    """Whether a chat *completion* has the ids of the answer, and not those of its prompt."""
    choice = completion["choices"][0]
    if any(choice["message"].get(key) is not None for key in TOKEN_FIELDS):
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
        raise build_bad_tokens_error("its token_ids differ from the ids among its log-probabilities")
    return spelled if beside is None else beside


def _content(choice: Item) -> list[Item]:
    return (choice.get("logprobs") or {}).get("content") or []


def _are_spelled(content: list[Item]) -> bool:
    return bool(content) and str(content[0].get("token")).startswith(TOKEN_ID_PREFIX)


def _spelled(content: list[Item]) -> list[int] | None:
    """The ids among *content*, `None` where it has texts: read as one list, for there may be many."""
    if not _are_spelled(content):
        return None
    words = "".join(map(itemgetter("token"), content))
    try:
        ids: list[int] = orjson.loads(f"[{words[len(TOKEN_ID_PREFIX) :].replace(TOKEN_ID_PREFIX, ',')}]")
    except orjson.JSONDecodeError:
        raise build_bad_tokens_error("some tokens of its log-probabilities are ids, and some are not") from None
    return ids


def check_token_fields(item: Item) -> None:
    """Raise `Failed` where an output *item* has some of the token fields, or such as do not fit together."""
    found = {key: item[key] for key in TOKEN_FIELDS if item.get(key) is not None}
    if found:
        _checked(found)


def _checked(found: Item) -> Item:
    if missing := [key for key in TOKEN_FIELDS if key not in found]:
        raise build_bad_tokens_error(f"it has some of the token fields, and no {missing[0]}")
    prompt, ids, chances = (found[key] for key in TOKEN_FIELDS)
    if not all(isinstance(each, list) for each in found.values()):
        raise build_bad_tokens_error("its token fields are no lists")
    if len(ids) != len(chances):
        raise build_bad_tokens_error(f"it has {len(ids)} token ids and {len(chances)} log-probabilities")
    if not (_are_ids(ids) and _are_ids(prompt) and _are_numbers(chances)):
        raise build_bad_tokens_error("its token ids are no whole numbers, or its log-probabilities no numbers")
    return found


def _are_ids(values: list[object]) -> bool:
    # A sum walks the list in C, and is a whole number only where all its members are.
    return _are_numbers(values) and isinstance(sum(values), int)  # type: ignore[arg-type]  # what the line above found


def _are_numbers(values: list[object]) -> bool:
    try:
        return math.isfinite(sum(values))  # type: ignore[arg-type]  # that is what is being found out
    except TypeError:
        return False


def build_bad_tokens_error(what: str) -> Failed:
    """The failure of an answer whose tokens nobody can be trained on, since *what*."""
    return Failed(f"the tokens of the model's answer do not fit together: {what}", kind="model_bad_tokens")
