"""Fake tokenizers: a text has several tokenizations, and the chat templates follow well-known styles."""

from __future__ import annotations

import json
import re
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

PAIRS = ("th", "he", "in", "er", "an", "on", "\n\n", '"}', "}}", "e\n", "ne", "si", ": ", '": "', "]\n", "e<", "x<")
FIRST_SPECIAL = 1000


@dataclass
class FakeTokenizer:
    """A tokenizer with bytes, some pairs of letters and special tokens; the longest match wins."""

    template: object
    specials: tuple[str, ...]
    eos: str
    has_added_tokens: bool = True
    returns_mapping: bool = False

    def __post_init__(self):
        self.pieces = {bytes([byte]): byte for byte in range(256)}
        self.pieces |= {pair.encode(): 256 + number for number, pair in enumerate(PAIRS)}
        self.marks = {mark: FIRST_SPECIAL + number for number, mark in enumerate(self.specials)}
        self.eos_token_id = self.marks.get(self.eos)
        self.texts = {number: piece for piece, number in self.pieces.items()}
        self.texts |= {number: mark.encode() for mark, number in self.marks.items()}
        self._pair = re.compile("|".join(re.escape(pair) for pair in sorted(PAIRS, key=len, reverse=True)).encode())
        self._mark = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")") if self.specials else None
        if self.has_added_tokens:
            self.added_tokens_decoder = {
                number: SimpleNamespace(content=mark, special=True) for mark, number in self.marks.items()
            }

    def __len__(self):
        return FIRST_SPECIAL + len(self.specials)

    def apply_chat_template(self, messages, /, *, tools=None, add_generation_prompt=False):
        ids = self.encode(self.template(messages, tools, add_generation_prompt))
        return UserDict({"input_ids": ids, "attention_mask": [1] * len(ids)}) if self.returns_mapping else ids

    def encode(self, text, /, *, add_special_tokens=False):
        spans = self._mark.split(text) if self._mark else [text]
        return [
            number
            for span in spans
            for number in ([self.marks[span]] if span in self.marks else self.encode_span(span))
        ]

    def encode_span(self, text):
        found, at, data = [], 0, text.encode()
        while at < len(data):
            pair = self._pair.match(data, at)
            piece = pair[0] if pair else data[at : at + 1]
            found.append(self.pieces[piece])
            at += len(piece)
        return found

    def decode(self, ids, /):
        return b"".join(self.texts[number] for number in ids).decode("utf-8", "replace")


def _calls(message):
    return [call["function"] for call in message.get("tool_calls") or []]


def _hermes(message):
    return "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in _calls(message))


def qwen(messages, tools, prompt):
    """Omit reasoning before the last user message; later assistant messages have a reasoning block, possibly empty."""
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    text = f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            content = message["content"].rpartition("</think>")[2].lstrip("\n")
            reasoning = "<think>\n\n</think>\n\n" if number > last else ""
            text += f"<|im_start|>assistant\n{reasoning}{content}{_hermes(message)}<|im_end|>\n"
        elif message["role"] == "tool":
            first = number == 0 or messages[number - 1]["role"] != "tool"
            final = number + 1 == len(messages) or messages[number + 1]["role"] != "tool"
            text += "<|im_start|>user" if first else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>" + ("<|im_end|>\n" if final else "")
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n<think>\n" if prompt else "")


def gemma(messages, tools, prompt):
    """End a turn with another token than the end-of-text token; reject system messages."""
    text = "<bos>"
    for message in messages:
        if message["role"] == "system":
            raise ValueError("no system role")
        role = "model" if message["role"] == "assistant" else "user"
        text += f"<start_of_turn>{role}\n{message['content'].strip()}{_hermes(message)}<end_of_turn>\n"
    return text + ("<start_of_turn>model\n" if prompt else "")


def mistral(messages, tools, prompt):
    """Mark the end of assistant turns only, without a start marker; omit the text of a turn with calls."""
    text = "<s>"
    for message in messages:
        if message["role"] == "assistant":
            calls = json.dumps([*_calls(message)])
            text += (f"[TOOL_CALLS] {calls}" if _calls(message) else f" {message['content']}") + "</s>"
        elif message["role"] == "tool":
            text += f'[TOOL_RESULTS] {{"content": {json.dumps(message["content"])}}}[/TOOL_RESULTS]'
        else:
            text += f"[INST] {message['content']}[/INST]"
    return text


def chatml(messages, tools, prompt):
    """Format every turn in the same way; the end-of-turn token is the end-of-text token."""
    text = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}{_hermes(message)}<|im_end|>\n" for message in messages
    )
    return text + ("<|im_start|>assistant\n" if prompt else "")


def without_terminator(messages, tools, prompt):
    """End turns without a special token."""
    text = "".join(f"{message['role']}: {message['content']}{_hermes(message)}\n\n" for message in messages)
    return text + ("assistant: " if prompt else "")


def without_assistant(messages, tools, prompt):
    """Omit the messages of the assistant."""
    return "".join(message["content"] + "<|im_end|>" for message in messages if message["role"] != "assistant")


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")

STYLES = {
    "qwen": (FakeTokenizer(qwen, CHATML, "<|im_end|>"), "<|im_end|>"),
    "gemma": (FakeTokenizer(gemma, GEMMA, "<eos>"), "<end_of_turn>"),
    "gemma without added_tokens_decoder": (
        FakeTokenizer(gemma, GEMMA, "<eos>", has_added_tokens=False),
        "<end_of_turn>",
    ),
    "mistral": (FakeTokenizer(mistral, MISTRAL, "</s>"), "</s>"),
    "chatml": (FakeTokenizer(chatml, CHATML, "<|im_end|>"), "<|im_end|>"),
    "chatml in a mapping": (FakeTokenizer(chatml, CHATML, "<|endoftext|>", returns_mapping=True), "<|im_end|>"),
}
"""Tokenizers by the style of their template, with the token that ends an assistant turn."""
