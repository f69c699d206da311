"""The token history of a conversation: which ids its next prompt must begin with.

The ids travel in the conversation itself: the last output item of each model call carries the ids of the call's prompt
and of its generation. The sender of the next call finds the whole history there and needs no other state.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from gymsdk.convert import content
from gymsdk.jsonl import dump_canonical_json, parse_json
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, TURNS_FIELD, is_on_policy
from gymsdk.types import Item, Row, extract_text, is_policy_item

DIGEST_BYTES = 8


class TokenHistory(NamedTuple):
    """The ids of the calls so far, and what happened after the last of them.

    Attributes:
        ids: The ids of the last call's prompt and generation.
        generated: The ids of its generation.
        turn: The output items of the last call, the last of which carries the ids.
        end: The number of input items up to and including them.
    """

    ids: list[int]
    generated: list[int]
    turn: list[Item]
    end: int


def find_history(items: Sequence[Item]) -> TokenHistory | None:
    """Return the token history in the input *items* of a request, `None` if no item carries ids."""
    index = next((index for index in reversed(range(len(items))) if _is_carrier(items[index])), None)
    if index is None:
        return None
    start = _find_turn_start(items, index)
    prompt, generated = items[index][TOKEN_FIELDS[0]], items[index][TOKEN_FIELDS[1]]
    return TokenHistory([*prompt, *generated], generated, [*items[start : index + 1]], index + 1)


def split_last_prompt(items: Sequence[Item]) -> list[list[int]]:
    """Return the prompt of the last turn in *items* in parts: the ids that the policy read and its turns, alternately.

    The parts begin and end with ids that the policy read. Such a part is empty if *items* do not show which of its ids
    the policy read and which it sampled, because they contain an earlier turn without ids, or because the prompt was
    rendered again with earlier turns.
    """
    carriers = [index for index, item in enumerate(items) if _is_carrier(item)]
    if not carriers:
        return []
    last = items[carriers[-1]]
    prompt: list[int] = last[TOKEN_FIELDS[0]]
    if (turns := last.get(TURNS_FIELD)) is not None:
        return [prompt[begin:end] for begin, end in pairwise([0, *turns, len(prompt)])]
    parts: list[list[int]] = []
    end = len(prompt)
    for earlier, index in zip([-1, *carriers][-2::-1], carriers[::-1], strict=False):
        begin = 0
        if earlier >= 0:
            sampled = items[earlier][TOKEN_FIELDS[1]]
            begin = len(items[earlier][TOKEN_FIELDS[0]]) + len(sampled)
            if begin > end or prompt[begin - len(sampled) : begin] != sampled or items[index].get(BROKEN_FIELD):
                # The prompt was rendered again, with the earlier turns.
                parts.append([])
                break
        is_mixed = any(map(is_policy_item, items[earlier + 1 : _find_turn_start(items, index)]))
        parts.append([] if is_mixed else prompt[begin:end])
        if earlier >= 0:
            parts.append(sampled)
            end = begin - len(sampled)
    return parts[::-1]


def _find_turn_start(items: Sequence[Item], carrier: int) -> int:
    """Return the index of the first item of the turn whose last item is the *carrier*."""
    start = carrier
    while start > 0 and is_policy_item(items[start - 1]) and not _is_carrier(items[start - 1]):
        start -= 1
    return start


def compute_digest(items: Sequence[Item], instructions: object, tools: object) -> str:
    """Return the digest of a conversation: of its texts, tool calls, tool outputs, *instructions* and *tools*.

    Reasoning, empty texts and ids do not count, because clients may leave them out.
    """
    selected = [[instructions or "", tools or []], *filter(None, map(_select_content, items))]
    return blake2b(dump_canonical_json(selected), digest_size=DIGEST_BYTES).hexdigest()


def mask_untrainable(line: Row) -> Row:
    """Return the line of a rollout, marked for trainers to leave out of the loss if its tokens are not the policy's.

    The reward stands. NeMo RL reads `instance_config.mask_sample`. A line is masked if a chain of token ids is broken,
    or if a call was decoded under a constraint.
    """
    output = (line.get("response") or {}).get("output") or []
    unbroken = drop_ids_after_break(output)
    if unbroken is None and all(map(is_on_policy, output)):
        return line
    config = line.get("instance_config")
    masked = line | {"instance_config": {**(config if isinstance(config, dict) else {}), "mask_sample": True}}
    return masked if unbroken is None else masked | {"response": line["response"] | {"output": unbroken}}


class Opening(NamedTuple):
    """Digests of a request without turns of the policy: of its system messages and tools, and of all its messages."""

    setting: str
    messages: str


def compute_opening(items: Sequence[Item], instructions: object, tools: object) -> Opening:
    """Return the digests of the first request of a conversation.

    An agent that replaces the turns of a conversation by a summary keeps the system messages and the tools. Another
    agent of the same rollout has its own, and a repeated request has the same messages.
    """
    system = [item for item in items if item.get("role") in {"system", "developer"}]
    return Opening(compute_digest(system, instructions, tools), compute_digest(items, instructions, tools))


def drop_ids_after_break(items: Sequence[Item]) -> list[Item] | None:
    """Return the output *items* of a rollout with token ids up to the first broken chain, `None` if none is broken.

    Trainers concatenate the ids of a rollout, and some stop with an error if they do not continue each other.
    """
    start = next((index for index, item in enumerate(items) if item.get(BROKEN_FIELD)), None)
    if start is None:
        return None
    return [
        *items[:start],
        *({key: value for key, value in item.items() if key not in TOKEN_FIELDS} for item in items[start:]),
    ]


def _is_carrier(item: Item) -> bool:
    return all(isinstance(item.get(key), list) for key in TOKEN_FIELDS[:2])


def _select_content(item: Item) -> list[object]:
    kind = item.get("type") or "message"
    if kind == "message":
        text = _get_text(item.get("content"))
        if item.get("role") == "assistant" and isinstance(text, str):
            # Clients may return the reasoning in tags, and leave out an empty text.
            text = content.split_think_blocks(text)[1].strip()
        return [item.get("role"), text] if text else []
    if kind == "function_call":
        return [kind, item.get("name"), _parse_arguments(item.get("arguments"))]
    if kind == "function_call_output":
        return [kind, _get_text(item.get("output"))]
    return [] if kind == "reasoning" else [kind]


def _parse_arguments(value: object) -> object:
    """Return the arguments of a call as a value, because clients write them to JSON in another form."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _get_text(value: object) -> object:
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return extract_text(value)
    return value
