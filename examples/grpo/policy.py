"""A language model of about 100,000 parameters with one token per character, and its chat template."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import nn

CHARACTERS = "0123456789"
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
PAD, END, USER, ASSISTANT = range(len(SPECIAL))
VOCABULARY = (*SPECIAL, *CHARACTERS)
CONTEXT = 64
"""The largest number of tokens of a conversation."""


class Policy(nn.Module):
    """A causal transformer with two layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of each next token, [batch, length, vocabulary], for *ids*, [batch, length]."""
        length = ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        return self.head(self.layers(hidden, mask=mask, is_causal=True)).log_softmax(-1)


def create_policy(seed: int) -> Policy:
    """Return a policy with random weights; the trainer and the generation server start from the same ones."""
    torch.manual_seed(seed)
    return Policy()


class DigitModel:
    """The policy with random weights, as the generation server uses a model.

    Args:
        seed: The seed of the weights.
    """

    context = CONTEXT
    end = END
    prompt_end = (ASSISTANT,)

    def __init__(self, seed: int) -> None:
        self.policy: nn.Module = create_policy(seed).eval()

    def encode(self, message: dict[str, Any]) -> list[int]:
        """Return the ids of one message, as the chat template writes it. Unknown characters are left out."""
        text = message["content"] or ""
        ids = [VOCABULARY.index(character) for character in text if character in CHARACTERS]
        return [ASSISTANT if message["role"] == "assistant" else USER, *ids, END]

    def decode(self, ids: list[int]) -> str:
        """Return the text of *ids* without special tokens."""
        return "".join(VOCABULARY[token] for token in ids if token >= len(SPECIAL))

    def score(self, prompt: list[int]) -> Generator[torch.Tensor, int, None]:
        """Yield the log-probabilities of the next token, and receive the token that was chosen."""
        ids = list(prompt)
        while True:
            ids.append((yield self.policy(torch.tensor([ids]))[0, -1]))
