"""A language model of about 100,000 parameters with random weights; its tokens are letters and digits."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for message in messages %}{{ '<assistant>' if message.role == 'assistant' else '<user>' }}{{ message.content }}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
VOCABULARY = (*SPECIAL, *" 0123456789abcdefghijklmnopqrstuvwxyz")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    # The linter takes names of tokens for passwords.
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(VOCABULARY)}, unk_token=" "))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[1], "additional_special_tokens": [*SPECIAL[2:]]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Return a model with two layers and random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).to(torch.float32)
