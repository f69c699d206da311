"""Small Qwen3 models for vLLM, and the warm-up that teaches them the form of a reply before GRPO begins."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from exercises import Exercise
from torch import nn

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation in the format of Chat Completions."""

SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>")
PAD, END, USER, ASSISTANT, _ = range(len(SPECIAL))
PRINTABLE = "".join(map(chr, range(32, 127)))
EXAMPLES = 2000
"""The number of conversations of the warm-up."""

CONTEXT = 128
"""The largest number of tokens of a conversation."""

MARKERS = ("<tool_call>", "</tool_call>")
"""Tokens that stay in the decoded text, because the model server looks for them."""

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}<end>"
    "{% elif message.role == 'tool' %}<tool>{{ message.content }}<end>"
    "{% elif message.role == 'assistant' %}<assistant>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The template leaves the instructions and the list of tools out: the model knows them from its warm-up."""

WORDS = re.compile(r"[A-Za-z_]+|[0-9]|[^A-Za-z0-9_]+")
"""Words, single digits, and runs of other characters are one token each."""


def build_tokenizer(conversations: list[Messages]) -> Any:
    """Return a tokenizer that has each word of *conversations* as a token, and each printable character."""
    rendered = (_create_tokenizer([]).apply_chat_template(messages, tokenize=False) for messages in conversations)
    parts = (part for text in rendered for part in re.split("|".join((*SPECIAL, *MARKERS)), text))
    return _create_tokenizer([word for part in parts for word in WORDS.findall(part)])


def _create_tokenizer(words: list[str]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict.fromkeys((*SPECIAL, *PRINTABLE, "\n", *MARKERS, *words))
    # The linter takes names of tokens for passwords.
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token=" "))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS.pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    special = {"eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD], "additional_special_tokens": [*SPECIAL[USER:]]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def build_model(tokenizer: Any, seed: int) -> Any:
    """Return a Qwen3 model of about 100,000 parameters with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


class LogProbabilities(nn.Module):
    """A model of transformers that returns the log-probabilities of each next token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, vocabulary] for *ids*, [batch, length]."""
        logits: torch.Tensor = self._model(ids).logits
        return logits.log_softmax(-1)


def build_warm_model(exercise: Exercise, seed: int) -> tuple[Any, Any]:
    """Return a model whose replies have the right form but often the wrong content, and its tokenizer."""
    conversations = play_oracle(exercise, EXAMPLES)
    tokenizer = build_tokenizer(conversations)
    model = build_model(tokenizer, seed)
    mixed = exchange_replies(conversations, exercise.warm_up_right, EXAMPLES)
    rows = [tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) for messages in mixed]
    warm_up(LogProbabilities(model), rows, exercise.warm_up_steps)
    return model, tokenizer


def play_oracle(exercise: Exercise, count: int) -> list[Messages]:
    """Return the conversations of at most *count* episodes that the environment's own solution plays.

    Raises:
        subprocess.CalledProcessError: gymsdk failed.
    """
    settings = [part for name, value in exercise.settings.items() for part in ("--set", f"{name}={value}")]
    # These tasks are not those of the training, which has another seed.
    choice = ["--split", "train", "--seed", "1000", "--limit", str(count), *settings, "--model", "scripted/oracle"]
    with tempfile.TemporaryDirectory() as folder:
        run, file = f"{folder}/run", f"{folder}/conversations.jsonl"
        for command in (["rollout", exercise.environment, *choice, "--output", run], ["export", run, "--sft", file]):
            subprocess.run([sys.executable, "-P", "-m", "gymsdk", *command], check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line)["messages"] for line in Path(file).read_text().splitlines()]


def exchange_replies(conversations: list[Messages], right: float, count: int) -> list[Messages]:
    """Return *count* random conversations, which keep the share *right* of their replies; others belong elsewhere."""
    rng = random.Random(0)

    def choose(conversation: Messages, turn: int) -> dict[str, Any]:
        is_kept = conversation[turn]["role"] != "assistant" or rng.random() < right
        return (conversation if is_kept else rng.choice(conversations))[turn]

    chosen = rng.choices(conversations, k=count)
    return [[choose(each, turn) for turn in range(len(each))] for each in chosen]


def warm_up(policy: nn.Module, rows: list[list[int]], steps: int, batch: int = 64) -> None:
    """Teach *policy* the replies in *rows*, the token ids of conversations."""
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD] * (length - len(row))] for row in rows])
    is_reply = mark_replies(ids)
    for _ in range(steps):
        chosen = torch.randint(len(rows), (batch,), generator=rng)
        logprobs = policy(ids[chosen, :-1]).gather(2, ids[chosen, 1:, None])[..., 0]
        mask = is_reply[chosen, 1:]
        loss = -(logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def mark_replies(ids: torch.Tensor) -> torch.Tensor:
    """Return 1.0 for each token of a reply, and for the token that ends it, in *ids*, [batch, length]."""
    marks = torch.zeros(ids.shape)
    for row, tokens in enumerate(ids.tolist()):
        inside = False
        for position, token in enumerate(tokens):
            marks[row, position] = float(inside)
            inside = token == ASSISTANT or (inside and token != END)
    return marks
