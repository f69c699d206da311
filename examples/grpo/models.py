"""Small Qwen3 models, and the warm-up that teaches them the form of a reply before GRPO begins."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from exercises import Exercise
from torch import nn

from gymsdk import load
from gymsdk.convert.chat import build_messages

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation in the format of Chat Completions."""

SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>")
PAD, END, USER, ASSISTANT, _ = range(len(SPECIAL))
PRINTABLE = "".join(map(chr, range(32, 127)))
EXAMPLES = 2000
"""The number of conversations of the warm-up."""

MIN_CONTEXT = 128
"""The largest number of tokens of a conversation, unless the environment's own solution needs more."""

DEFAULT_REPLY_TOKENS = 64
"""The largest number of tokens of a reply in an environment without a solution."""

BATCH_TOKENS = 8192
"""The largest number of tokens of a batch of the warm-up."""

MARKERS = ("<tool_call>", "</tool_call>")
"""Tokens that stay in the decoded text, because the model server looks for them."""

TEMPLATE = (
    "{% for message in messages %}{% if message.role in ROLES %}<user>{{ message.content }}<end>"
    "{% elif message.role == 'tool' %}<tool>{{ message.content }}<end>"
    "{% elif message.role == 'assistant' %}<assistant>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The template leaves the list of tools out, and for some exercises the instructions: the model knows them from its
warm-up.
"""

WORDS = re.compile(r"[A-Za-z_]+|[0-9]|[^A-Za-z0-9_]+")
"""Words, single digits, and runs of other characters are one token each."""


def build_tokenizer(conversations: list[Messages], *, shows_instructions: bool) -> Any:
    """Return a tokenizer that has each word of *conversations* as a token, and each printable character.

    The tokens of an unknown word are its characters and the known words in it.
    """
    roles = ("user", "system") if shows_instructions else ("user",)
    template = TEMPLATE.replace("ROLES", str(roles))
    plain = _create_tokenizer([], template)
    rendered = (plain.apply_chat_template(messages, tokenize=False) for messages in conversations)
    parts = (part for text in rendered for part in re.split("|".join((*SPECIAL, *MARKERS)), text))
    return _create_tokenizer([word for part in parts for word in WORDS.findall(part)], template)


def _create_tokenizer(words: list[str], template: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = dict.fromkeys((*SPECIAL, *PRINTABLE, "\n", *MARKERS, *words))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # The linter takes names of tokens for passwords.
    pieces = models.WordPiece(vocabulary, unk_token=" ", continuing_subword_prefix="", max_input_chars_per_word=10_000)  # noqa: S106
    tokenizer = Tokenizer(pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS.pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    special = {"eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD], "additional_special_tokens": [*SPECIAL[USER:]]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def build_model(tokenizer: Any, seed: int, context: int = MIN_CONTEXT) -> Any:
    """Return a Qwen3 model of about 100,000 parameters, and 128 for each token, with random weights."""
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
        max_position_embeddings=context,
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


class FolderModel:
    """A model of transformers in a folder, as the generation server uses a model.

    Args:
        folder: The folder, with the model's tokenizer.
    """

    end = END
    prompt_end = (ASSISTANT,)

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer, Qwen3ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.policy: nn.Module = LogProbabilities(self._model)
        self.context: int = self._model.config.max_position_embeddings

    def encode(self, message: dict[str, Any]) -> list[int]:
        """Return the ids of one message; the template writes each message without regard to the others."""
        ids: list[int] = self._tokenizer.apply_chat_template([message], tokenize=True, return_dict=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of *ids* without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def score(self, prompt: list[int]) -> Generator[torch.Tensor, int, None]:
        """Yield the log-probabilities of the next token, and receive the token that was chosen."""
        new, cache = prompt, None
        while True:
            result = self._model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            new = [(yield result.logits[0, -1].log_softmax(-1))]


class WarmModel(NamedTuple):
    """A model whose replies have the right form but often the wrong content.

    Attributes:
        model: The model of transformers.
        tokenizer: Its tokenizer.
        max_reply_tokens: The largest number of tokens of a reply.
    """

    model: Any
    tokenizer: Any
    max_reply_tokens: int


def build_warm_model(exercise: Exercise, split: str, seed: int) -> WarmModel:
    """Return a model after its warm-up; without a solution of the environment, a model with random weights."""
    conversations = play_oracle(exercise, split, EXAMPLES)
    has_solution = conversations is not None
    conversations = conversations or list_prompts(exercise, split, EXAMPLES)
    tokenizer = build_tokenizer(conversations, shows_instructions=exercise.shows_instructions)
    mixed = exchange_replies(conversations, exercise.warm_up_right, EXAMPLES)
    rows = [tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) for messages in mixed]
    lengths = [end - start for row in rows for start, end in _find_replies(row)]
    limit = exercise.max_reply_tokens or (max(lengths) * 5 // 4 if has_solution else DEFAULT_REPLY_TOKENS)
    # A policy may need more turns than the solution.
    context = MIN_CONTEXT if exercise.max_reply_tokens else max(MIN_CONTEXT, max(map(len, rows)) * 3 // 2 + 2 * limit)
    model = build_model(tokenizer, seed, context)
    if has_solution:
        warm_up(LogProbabilities(model), rows, exercise.warm_up_steps)
    return WarmModel(model, tokenizer, limit)


def play_oracle(exercise: Exercise, split: str, count: int) -> list[Messages] | None:
    """Return the conversations of at most *count* episodes that the environment's own solution plays.

    Returns:
        The conversations, `None` if the environment has no solution.

    Raises:
        SystemExit: gymsdk failed.
    """
    if not hasattr(load(exercise.environment, **exercise.settings).plugin, "solve"):
        return None
    settings = format_settings(exercise.settings)
    # These tasks are not those of the training, which has another seed.
    choice = ["--split", split, "--seed", "1000", "--limit", str(count), *settings, "--model", "scripted/oracle"]
    with tempfile.TemporaryDirectory() as folder:
        run, file = f"{folder}/run", f"{folder}/conversations.jsonl"
        for command in (["rollout", exercise.environment, *choice, "--output", run], ["export", run, "--sft", file]):
            done = subprocess.run(
                [sys.executable, "-P", "-m", "gymsdk", *command], check=False, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise SystemExit(f"the warm-up failed: gymsdk {command[0]}: {done.stderr.strip()}")
        return [json.loads(line)["messages"] for line in Path(file).read_text().splitlines()]


def list_prompts(exercise: Exercise, split: str, count: int) -> list[Messages]:
    """Return the prompts of at most *count* tasks."""
    tasks = load(exercise.environment, **exercise.settings).tasks(split, seed=1000)
    return [build_messages({"input": task.input}) for task in islice(tasks, count)]


def format_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the options of gymsdk's commands for the settings of an environment."""
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def exchange_replies(conversations: list[Messages], right: float, count: int) -> list[Messages]:
    """Return *count* random conversations, which keep the share *right* of their replies; others belong elsewhere."""
    rng = random.Random(0)
    replies: dict[int, list[dict[str, Any]]] = {}
    for conversation in conversations:
        for turn, message in enumerate(conversation):
            if message["role"] == "assistant":
                replies.setdefault(turn, []).append(message)

    def choose(conversation: Messages, turn: int) -> dict[str, Any]:
        is_kept = conversation[turn]["role"] != "assistant" or rng.random() < right
        return conversation[turn] if is_kept else rng.choice(replies[turn])

    chosen = rng.choices(conversations, k=count)
    return [[choose(original, turn) for turn in range(len(original))] for original in chosen]


def warm_up(policy: nn.Module, rows: list[list[int]], steps: int) -> None:
    """Teach *policy* the replies in *rows*, the token ids of conversations."""
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    length = max(map(len, rows))
    batch = max(1, min(64, BATCH_TOKENS // length))
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
        for start, end in _find_replies(tokens):
            marks[row, start:end] = 1.0
    return marks


def _find_replies(tokens: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each reply in a conversation, with the token that ends it."""
    for position, token in enumerate(tokens):
        if token == ASSISTANT:
            yield position + 1, tokens.index(END, position) + 1
