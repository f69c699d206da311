"""Tokenizers for tests: a text has several tokenizations, and the templates have well-known styles."""

from __future__ import annotations

import json
import re
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

PAIRS = ("th", "he", "in", "er", "an", "on", "\n\n", '"}', "}}", "e\n", "ne", "si", ": ", '": "', "]\n", "e<", "x<")
FIRST_SPECIAL = 1000


@dataclass
class Made:
    """Bytes, some pairs of letters, and special tokens; the longest piece wins."""

    template: object
    specials: tuple[str, ...]
    eos: str
    told: bool = True
    boxed: bool = False

    def __post_init__(self):
        self.pieces = {bytes([byte]): byte for byte in range(256)}
        self.pieces |= {pair.encode(): 256 + number for number, pair in enumerate(PAIRS)}
        self.marks = {mark: FIRST_SPECIAL + number for number, mark in enumerate(self.specials)}
        self.eos_token_id = self.marks.get(self.eos)
        self.texts = {number: piece for piece, number in self.pieces.items()}
        self.texts |= {number: mark.encode() for mark, number in self.marks.items()}
        self._pair = re.compile("|".join(re.escape(pair) for pair in sorted(PAIRS, key=len, reverse=True)).encode())
        self._mark = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")") if self.specials else None
        if self.told:
            self.added_tokens_decoder = {
                number: SimpleNamespace(content=mark, special=True) for mark, number in self.marks.items()
            }

    def __len__(self):
        return FIRST_SPECIAL + len(self.specials)

    def apply_chat_template(self, messages, /, *, tools=None, add_generation_prompt=False):
        ids = self.encode(self.template(messages, tools, add_generation_prompt))
        return UserDict({"input_ids": ids, "attention_mask": [1] * len(ids)}) if self.boxed else ids

    def encode(self, text, /, *, add_special_tokens=False):
        spans = self._mark.split(text) if self._mark else [text]
        return [number for span in spans for number in ([self.marks[span]] if span in self.marks else self.spell(span))]

    def spell(self, text):
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
    """Thoughts before the last question of a user are left out; the last answer has a block of them, be it empty."""
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    text = f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            words = message["content"].rpartition("</think>")[2].lstrip("\n")
            thought = "<think>\n\n</think>\n\n" if number > last else ""
            text += f"<|im_start|>assistant\n{thought}{words}{_hermes(message)}<|im_end|>\n"
        elif message["role"] == "tool":
            first = number == 0 or messages[number - 1]["role"] != "tool"
            final = number + 1 == len(messages) or messages[number + 1]["role"] != "tool"
            text += "<|im_start|>user" if first else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>" + ("<|im_end|>\n" if final else "")
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n<think>\n" if prompt else "")


def gemma(messages, tools, prompt):
    """A turn ends with a token that is not the one a text ends with; roles must alternate."""
    text = "<bos>"
    for message in messages:
        if message["role"] == "system":
            raise ValueError("no system role")
        role = "model" if message["role"] == "assistant" else "user"
        text += f"<start_of_turn>{role}\n{message['content'].strip()}{_hermes(message)}<end_of_turn>\n"
    return text + ("<start_of_turn>model\n" if prompt else "")


def mistral(messages, tools, prompt):
    """A policy's turn alone has an end, and nothing says that it begins; with calls its words are left out."""
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
    """Every turn alike, the end of one the token that ends a text."""
    text = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}{_hermes(message)}<|im_end|>\n" for message in messages
    )
    return text + ("<|im_start|>assistant\n" if prompt else "")


def lines(messages, tools, prompt):
    """No token of its own ends a turn."""
    text = "".join(f"{message['role']}: {message['content']}{_hermes(message)}\n\n" for message in messages)
    return text + ("assistant: " if prompt else "")


def deaf(messages, tools, prompt):
    """What the policy said is left out."""
    return "".join(message["content"] + "<|im_end|>" for message in messages if message["role"] != "assistant")


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")

STYLES = {
    "qwen": (Made(qwen, CHATML, "<|im_end|>"), "<|im_end|>"),
    "gemma": (Made(gemma, GEMMA, "<eos>"), "<end_of_turn>"),
    "gemma untold": (Made(gemma, GEMMA, "<eos>", told=False), "<end_of_turn>"),
    "mistral": (Made(mistral, MISTRAL, "</s>"), "</s>"),
    "chatml": (Made(chatml, CHATML, "<|im_end|>"), "<|im_end|>"),
    "chatml boxed": (Made(chatml, CHATML, "<|endoftext|>", boxed=True), "<|im_end|>"),
}
"""Tokenizers by the style of their template, and the token that ends a policy's turn."""
