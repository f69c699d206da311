"""Build a tiny Qwen3 model with random weights, a byte-level BPE tokenizer and a chat template that drops reasoning.

Run it with the Python of an environment that has vLLM: `python build_tiny_model.py FOLDER`. The model has two layers
and about 200,000 parameters; it writes random text. Its tokenizer encodes most words in several ways, and its template
leaves the reasoning of earlier turns out of a prompt, as that of Qwen3 does. The same tokens therefore rarely return
when a conversation is rendered again.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

SENTENCES = [
    "What is the weather in Paris today? The answer is yes or no.",
    "the quick brown fox jumps over the lazy dog and then there was another one",
    'Call the tool with {"name": "get_weather", "arguments": {"city": "Berlin", "unit": "celsius"}}',
    "You are a helpful assistant. # Tools: these functions are at your service.",
    "<tool_call>\n{}\n</tool_call> <tool_response>\nresult: 42\n</tool_response>",
    string.ascii_letters + string.digits + string.punctuation,
]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Added tokens that stay in the decoded text, because parsers look for them."""

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- set reasoning = message.reasoning_content or message.reasoning or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or reasoning) %}<think>
{{ reasoning }}
</think>

{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function %}
{%- if content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ function.name }}", "arguments": {{ function.arguments if function.arguments is string \
else function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_model(folder: Path) -> None:
    """Write the model, its tokenizer and its configuration into *folder*."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, special_tokens=SPECIAL_TOKENS)
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.4,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    generation = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))


if __name__ == "__main__":
    build_model(Path(sys.argv[1]))
