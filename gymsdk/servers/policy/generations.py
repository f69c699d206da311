"""Generations: what a policy says, as an engine lets it be said, and the tokens it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from gymsdk import wire
from gymsdk.convert import parts
from gymsdk.convert.tokens import MARK
from gymsdk.tokens import hermes
from gymsdk.tokens.spoken import spoken
from gymsdk.transcript import Item, is_reply

from . import prompts
from .prompts import BYTES


@dataclass(frozen=True, slots=True)
class Generation:
    """The *output* of one turn and the *words* that say it, *whole* unless the room for it ended first."""

    output: list[Item]
    words: str
    whole: bool = True
    size: int = 0

    def ids(self) -> list[int]:
        """Give the ids of its tokens; the last of a whole one ends the turn."""
        written = BYTES.encode(self.words)
        return [*written, BYTES.eos_token_id] if self.whole else written[: self.size]


def generation(output: list[Item], *, turn: int, room: int | None, thoughts: bool, parsed: bool) -> Generation:
    """Give the generation that says *output*, or as much of it as there is *room* for.

    What is left of the *turn* is taken apart again, its calls only where they are *parsed*; *thoughts* says that they
    are told.
    """
    words = prompts.words(output, thoughts=thoughts)
    size = prompts.size(words) + 1
    if room is None or size <= room:
        return Generation(output, words, size=size)
    left = _unmarked(words.encode("utf-8", "replace")[:room].decode("utf-8", "ignore"))
    return Generation(_apart(left, turn=turn, parsed=parsed), words, whole=False, size=room)


def alone(output: list[Item]) -> list[Item]:
    """Give *output* with no call but the first."""
    first = next((item for item in output if item.get("type") == "function_call"), None)
    return [item for item in output if item is first or item.get("type") != "function_call"]


def malformed(output: list[Item]) -> list[Item]:
    """Give *output* with half of the arguments of its first call."""
    first = next((item for item in output if item.get("type") == "function_call"), None)
    return [item | {"arguments": _half(item["arguments"])} if item is first else item for item in output]


def unparsed(output: list[Item]) -> list[Item]:
    """Give *output* with its calls as the policy wrote them, in the text."""
    calls = [hermes.call(item) for item in output if item.get("type") == "function_call"]
    if not calls:
        return output
    thoughts = [item for item in output if item.get("type") == "reasoning"]
    return [*thoughts, wire.message(prompts.words(output, thoughts=False))]


def chance(token: int, place: int) -> float:
    """Give the log-probability of a *token* at a *place*: -(1 + (31 token + 17 place) mod 97) / 50, always."""
    return -(1 + (31 * token + 17 * place) % 97) / 50


def logprobs(ids: list[int], *, as_ids: bool, top: bool) -> list[Item]:
    """Give the log-probabilities of *ids* as a chat has them; *top* tells each also as the likeliest in its place."""
    return [_likely(token, place, as_ids=as_ids, top=top) for place, token in enumerate(ids)]


def likely(said: Generation, *, top: bool) -> list[Item]:
    """Give the output of what was *said*, each text with the log-probabilities of its tokens, as Responses has them."""
    return [
        item | {"content": [_with(part, said, top=top) for part in item["content"]]} if is_reply(item) else item
        for item in said.output
    ]


def _with(part: Item, said: Generation, *, top: bool) -> Item:
    text = part.get("text")
    if not isinstance(text, str) or not text:
        return part
    before = said.words.partition(text)[0] if text in said.words else ""
    place, ids = prompts.size(before), BYTES.encode(text)
    told = [_likely(token, place + number, as_ids=False, top=top) for number, token in enumerate(ids)]
    return part | {"logprobs": told}


def _likely(token: int, place: int, *, as_ids: bool, top: bool) -> Item:
    text = BYTES.decode([token])
    spelled = [*text.encode()] if token >= 256 else [token]  # noqa: PLR2004 - the first that is no byte
    one: Item = {"token": f"{MARK}{token}" if as_ids else text, "logprob": chance(token, place), "bytes": spelled}
    return one | {"top_logprobs": [one] if top else []}


def _apart(words: str, *, turn: int, parsed: bool) -> list[Item]:
    """The output that *words* say; without a parser of calls these stay text."""
    if parsed:
        return spoken(words).build_items(turn=turn)
    thoughts, text = parts.thoughts(words)
    said = [wire.message(text)] if text or not thoughts else []
    return [wire.reasoning(*thoughts), *said] if thoughts else said


def _unmarked(words: str) -> str:
    """Give *words* that were cut, without the beginning of a mark: to most tokenizers each mark is one token."""
    thinking = words.startswith(parts.OPENING) and parts.CLOSING not in words
    mark = parts.CLOSING if thinking else parts.OPENING
    if not thinking and not mark.startswith(words):
        return words
    torn = next((size for size in range(len(mark) - 1, 0, -1) if words.endswith(mark[:size])), 0)
    return words[: len(words) - torn]


def _half(arguments: str) -> str:
    return arguments[: (len(arguments) + 1) // 2]
