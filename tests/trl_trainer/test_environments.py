"""TRL's own tool loop plays an environment: `GRPOTrainer(environment_factory=gymsdk.trl.environment(NAME))`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gymsdk import Environment
from gymsdk.errors import UsageError

pytestmark = [
    pytest.mark.timeout(300),
    # Those of TRL and transformers, about their own code and about experimental functions.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(find_spec("trl") is None, reason="pip install gymsdk[trl]"),
]

SHOP = '''
class Order(Task):
    item: str
    amount: int
    can_pay: bool


class Basket(State):
    amount: int = 0
    calls: int = 0


async def add(state: Basket, item: str, amount: Annotated[int, "How many."] = 1) -> str:
    """Put an item into the basket."""
    state.calls += 1
    state.amount += amount
    return f"{state.amount} {item}"


async def pay(state: Basket, method: Literal["card", "cash"], note: str | None = None) -> str:
    """Pay for the basket."""
    if method == "cash":
        raise RuntimeError("the till is broken")
    return "paid"


@hookimpl
def tools():
    return [add, pay]


@hookimpl
def tasks(split: Literal["train"]):
    for number in range(4):
        yield Order.ask(f"Buy {number + 2} pears.", item="pear", amount=number + 2, can_pay=number % 2 == 0)


@hookimpl
def reset(task: Order):
    return Reset(state=Basket(), tools=["add", "pay"] if task.can_pay else ["add"])


@hookimpl
def verify(task: Order, state: Basket, transcript):
    right, polite = state.amount == task.amount, "Done" in transcript.reply
    return Verdict(reward=(right + polite) / 2)
'''


@pytest.fixture
def shop(environment: Callable[..., Environment]) -> Environment:
    return environment(SHOP)


def test_the_methods_are_the_tools_of_the_row(shop: Environment) -> None:
    from transformers.utils import get_json_schema

    from gymsdk.trl import environment

    factories = environment(shop)
    assert len(factories) == 2, "one factory for each set of tools"
    for row, entry in zip(factories.rows, factories.dataset, strict=True):
        made = factories[entry["environment"]]()
        offered = {tool["name"]: tool for tool in row["responses_create_params"]["tools"]}
        methods = {name for name in dir(made) if not name.startswith("_")} - {"reset"}
        assert methods == set(offered)
        for name, tool in offered.items():
            schema = get_json_schema(getattr(made, name))["function"]
            assert schema["name"] == name
            assert schema["description"] == tool["description"]
            assert set(schema["parameters"]["properties"]) == set(tool["parameters"]["properties"])
    schema = get_json_schema(factories[factories.dataset[0]["environment"]]().pay)["function"]["parameters"]
    assert schema["properties"]["method"]["enum"] == ["card", "cash"]
    assert schema["required"] == ["method"]


def test_calls_change_the_episode_and_the_last_reply_is_graded(shop: Environment) -> None:
    from gymsdk.trl import environment

    factories = environment(shop)
    made = factories[factories.dataset[0]["environment"]]()
    for reply, reward in (("Done.", 1.0), ("Never.", 0.5)):
        assert made.reset(**factories.dataset[0]) is None
        assert made.add(item="pear", amount=1) == "1 pear"
        assert made.add(item="pear", amount=1) == "2 pear"
        assert factories.reward([[{"role": "assistant", "content": reply}]], [made]) == [reward]
    made.reset(**factories.dataset[2])
    assert "amount" in made.add(item="pear", amount="many")
    assert made.pay(method="card") == "paid"
    unfinished = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]
    assert factories.reward([unfinished], [made]) == [0.0]
    assert made.pay(method="card") == "the episode is over"


def test_a_tool_named_as_a_method_of_trl_is_refused(environment: Callable[..., Environment]) -> None:
    from gymsdk import trl

    wrong = SHOP.replace("async def pay", "async def get_reward").replace("pay]", "get_reward]")
    with pytest.raises(UsageError, match="'get_reward'"):
        trl.environment(environment(wrong.replace('"pay"', '"get_reward"')))


def build_policy(folder: Path) -> tuple[Any, Any]:
    """Return a model that buys what the prompt asks for, with two calls in one turn, and its tokenizer."""
    import torch
    from tokens.vllm.build_tiny_model import build_model
    from transformers import AutoTokenizer, Qwen3ForCausalLM
    from trl.chat_template_utils import qwen3_chat_template

    build_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_chat_template

    class Buyer(Qwen3ForCausalLM):
        """Generates fixed turns; its log-probabilities and its training are those of the model."""

        def generate(self, input_ids: Any = None, **_: Any) -> Any:
            turns = [torch.tensor(self.write_turn(tokenizer.decode(ids))) for ids in input_ids]
            length = max(map(len, turns))
            padded = [
                torch.nn.functional.pad(turn, (0, length - len(turn)), value=tokenizer.pad_token_id) for turn in turns
            ]
            return torch.cat([input_ids, torch.stack(padded)], dim=1)

        def write_turn(self, prompt: str) -> list[int]:
            amount = int(re.findall(r"Buy (\d+) pears", prompt)[-1])
            parts = [{"name": "add", "arguments": {"item": "pear", "amount": pears}} for pears in (1, amount - 1)]
            calls = "".join(f"<tool_call>\n{json.dumps(part)}\n</tool_call>\n" for part in parts)
            text = "Done." if "<tool_response>" in prompt else calls.rstrip()
            return [*tokenizer.encode(text), tokenizer.eos_token_id]

    return Buyer.from_pretrained(folder), tokenizer


def test_a_trainer_plays_parallel_calls_and_trains(shop: Environment, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    from gymsdk.trl import environment

    factories = environment(shop)
    model, tokenizer = build_policy(tmp_path / "model")
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=factories.dataset,
        environment_factory=factories,
        reward_funcs=factories.reward,
        args=GRPOConfig(
            output_dir=str(tmp_path / "trained"),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=400,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in entries] == [1.0, 1.0]
    assert [entry["failed_rollouts"] for entry in entries] == [0.0, 0.0]
    assert [entry["tools/call_frequency"] for entry in entries] == [2.0, 2.0]
    assert [entry["tools/failure_frequency"] for entry in entries] == [0.0, 0.0]
