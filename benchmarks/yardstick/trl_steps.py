"""Play steps of a training with TRL, with a stub of the trainer that generates at once.

usage: trl_steps.py CASE EPISODES

The script waits for a line on its standard input, plays the episodes of one step, and prints a line of JSON: the CPU
time of all threads of the process in seconds, the number of turns, the mean reward, and a digest of all samples.
`trl_episodes.py` runs it with two source trees in turn.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import gymsdk
from gymsdk.trl import rollout_func

GENERATIONS = 16
"""The number of episodes of each task in a step."""

CONTEXT = 1 << 20
VOCABULARY = 4096
END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n\nThese are your functions:\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% for message in messages %}{% if message.role == 'system' %}"
    "{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>\n{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template in the manner of Qwen's: ChatML, with the tools in the system message."""


def call(name: str, **arguments: Any) -> str:
    """Return the text of a turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Case:
    """An environment, and the replies of the stub's turns; the number of the episode selects one reply of a turn."""

    environment: str
    turns: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


CITIES = ("Porto", "Hanoi", "Oslo", "Lima", "Cairo")

CASES = {
    "tool_call, 1 turn": Case("tool_call", (("Answer: 42", "Done.", "It is cold in Oslo.\nAnswer: 7"),)),
    "tool_call, 3 turns": Case(
        "tool_call",
        (
            tuple(call("get_weather", city=city) for city in CITIES),
            tuple(call("get_distance", origin=city, destination="Rome") for city in CITIES),
            ("Answer: 42", "Done."),
        ),
    ),
    "multineedle, 4 turns": Case(
        "multineedle",
        (
            tuple(call("get_synonym_value", synonym=word) for word in ("Hot", "Warm", "Boiling")),
            tuple(call("get_synonym_value", synonym=word) for word in ("Cold", "Icy")),
            (call("extract_synonym_values", synonym_values=[1, 2]), call("extract_synonym_values", synonym_values=[])),
            ("I have extracted the values.",),
        ),
    ),
    "math, 1 turn": Case("math", (("So it is \\boxed{42}.", "\\boxed{7}", "I do not know."),)),
}


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that is trained on *texts*."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    special = {"eos_token": END, "pad_token": SPECIAL[0], "additional_special_tokens": [SPECIAL[1]]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


class Trainer:
    """What gymsdk uses of a `GRPOTrainer`; the policy's turns are fixed texts.

    Args:
        case: The texts.
        tokenizer: The tokenizer.
    """

    use_vllm = False
    num_generations = num_generations_eval = GENERATIONS

    def __init__(self, case: Case, tokenizer: PreTrainedTokenizerFast) -> None:
        self.processing_class = tokenizer
        self.model = SimpleNamespace(training=True, config=SimpleNamespace(max_position_embeddings=CONTEXT))
        self.accelerator = SimpleNamespace(num_processes=1)
        self.args = SimpleNamespace(max_completion_length=512)
        self.state = SimpleNamespace(global_step=0)
        self._turns = [[[*tokenizer.encode(text), tokenizer.eos_token_id] for text in turn] for turn in case.turns]
        self.turn = 0

    def _generate_single_turn(
        self, prompts: list[list[int]], *_: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        replies = self._turns[min(self.turn, len(self._turns) - 1)]
        self.turn += 1
        generated = [list(replies[(self.turn + number) % len(replies)]) for number in range(len(prompts))]
        return generated, [[-0.5] * len(ids) for ids in generated]


def build_step(case: Case, episodes: int) -> Callable[[int], dict[str, Any]]:
    """Return a function that plays the step with a number."""
    rollouts = rollout_func(case.environment, limit=512, settings=case.settings)
    loaded = gymsdk.load(case.environment, **case.settings)
    schemas = [json.dumps(tool.schema) for tool in loaded.tools.values()]
    texts = [json.dumps(row["responses_create_params"]["input"]) for row in rollouts.rows[:64]]
    trainer: Any = Trainer(case, build_tokenizer([*schemas, *texts, *(text for turn in case.turns for text in turn)]))
    dataset = [[{"role": "user", "content": "", "task": number}] for number in range(len(rollouts.rows))]

    def play(step: int) -> dict[str, Any]:
        trainer.turn = 0
        tasks = episodes // GENERATIONS
        first = step * tasks
        prompts = [dataset[number % len(dataset)] for number in range(first, first + tasks) for _ in range(GENERATIONS)]
        began = time.process_time()
        result = rollouts(prompts, trainer)
        cpu = time.process_time() - began
        digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()
        rewards = [reward or 0.0 for reward in result["gymsdk_reward"]]
        return {"cpu": cpu, "turns": trainer.turn, "reward": sum(rewards) / len(rewards), "digest": digest}

    return play


def main() -> None:
    """Play a step for each line of the standard input."""
    play = build_step(CASES[sys.argv[1]], int(sys.argv[2]))
    print(json.dumps({"gymsdk": gymsdk.__file__}), flush=True)
    for step, _ in enumerate(sys.stdin):
        print(json.dumps(play(step)), flush=True)


if __name__ == "__main__":
    main()
