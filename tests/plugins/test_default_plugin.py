"""The default plugin. The name of each test begins with its hook."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import AfterValidator, Field

from gymsdk import Claims, Environment, Message, State, Step, Task, ToolCall, Verdict, hookimpl
from gymsdk.errors import BadRow, Failed, UnknownSplit
from gymsdk.plugins.results import DefaultPlugin


class Bag(State):
    held: list[str] = Field(default_factory=list)


def take(state: Bag, what: str, times: int = 1) -> list[str]:
    """Put something into the bag."""
    state.held += [what] * times
    return state.held


async def weigh(state: Bag) -> int:
    """Count the items in the bag."""
    return len(state.held)


def spill() -> object:
    """Return a value that JSON cannot hold."""
    return object()


def look_up(what: Annotated[str, AfterValidator(lambda value: {}[value])]) -> str:
    """Look something up with a validator that raises an error."""
    return what


class Packing:
    """An environment that leaves every hook to the default plugin, except the bag and the rewards."""

    @hookimpl
    def reset(self, task):
        from gymsdk import Reset

        return Reset(state=Bag()) if task.responses_create_params.get("bag", True) else None

    @hookimpl
    def step(self, action):
        return Step(reward=0.5, done=True) if isinstance(action, Message) and action.text == "paid" else None

    @hookimpl
    def tools(self):
        return [take, weigh, spill, look_up]


def build_task(**params) -> Task:
    return Task.model_validate({"responses_create_params": {"input": "Pack.", **params}})


async def call_tools(*calls: ToolCall, **params) -> list:
    environment = Environment("packing", Packing())
    episode = await environment.reset(build_task(**params))
    return [(await environment.step(episode, call)).output for call in calls]


async def test_reset_starts_with_the_rows_prompt_a_plain_state_and_every_tool():
    episode = await Environment("packing", Packing()).reset(build_task(bag=False))
    assert episode.transcript.opening == [{"role": "user", "content": "Pack."}]
    assert type(episode.state) is State
    assert [tool["name"] for tool in episode.tools] == ["take", "weigh", "spill", "look_up"]


async def test_step_ends_the_episode_on_a_plain_reply():
    environment = Environment("packing", Packing())
    episode = await environment.reset(build_task())
    assert await environment.step(episode, Message(content="done")) == Step(done=True)


async def test_step_runs_the_tool_of_that_name_with_validated_arguments():
    calls = ToolCall(name="take", arguments={"what": "hat", "times": "2"}), ToolCall(name="weigh")
    assert await call_tools(*calls) == ['["hat","hat"]', "2"]


async def test_step_answers_wrong_arguments_with_the_reason():
    [output] = await call_tools(ToolCall(name="take", arguments={"times": "many"}))
    message = json.loads(output)["error"]
    assert message.startswith("Invalid tool call arguments for take: what: Field required; times: Input should be a va")


async def test_step_answers_a_tool_that_only_the_row_names():
    [output] = await call_tools(ToolCall(name="wiegh"), tools=[{"type": "function", "name": "wiegh"}])
    assert json.loads(output)["error"] == "The tool 'wiegh' cannot be run here; continue without it."


async def test_step_names_the_tool_that_returned_a_value_that_is_not_json():
    with pytest.raises(Failed, match="tool 'spill' returned a value that JSON does not support: ") as caught:
        await call_tools(ToolCall(name="spill"))
    assert (caught.value.stage, caught.value.kind) == ("step", "tool_bad_answer")


async def test_step_names_the_tool_with_a_failing_argument_validator():
    with pytest.raises(Failed, match="tool 'look_up': a validator of its arguments raised KeyError: 'hat'") as caught:
        await call_tools(ToolCall(name="look_up", arguments={"what": "hat"}))
    assert (caught.value.stage, caught.value.kind) == ("step", "tool_raised")


async def test_verify_adds_nothing_to_the_step_rewards():
    environment = Environment("packing", Packing())
    assert await environment.verify(await environment.reset(build_task())) == Verdict(reward=0.0)


async def test_claims_are_a_maximum_of_one_and_a_chance_of_zero():
    assert await Environment("packing", Packing()).claims(build_task()) == Claims(maximum=1.0, chance=0.0, variants=[])


def build_stored(tmp_path: Path, made, **splits: str) -> Environment:
    """Return the environment of a package with its tasks in files."""
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    for split, text in splits.items():
        (data / f"{split}.jsonl").write_text(text)
    module = made("@hookimpl\ndef verify(): ...", "stored")
    module.__file__ = str(tmp_path / "stored.py")
    return Environment("stored", module)


async def test_tasks_are_the_rows_of_the_packages_files(tmp_path: Path, made):
    row = {"responses_create_params": {"input": "Pack."}, "id": 1}
    environment = build_stored(tmp_path, made, train=f"{json.dumps(row)}\n\n{json.dumps(row)}\n", test="")
    assert environment.splits == ("test", "train")
    assert [task.row() for task in environment.tasks("train")] == [row, row]


def test_tasks_of_a_file_with_a_bad_line_name_the_line(tmp_path: Path, made):
    environment = build_stored(tmp_path, made, train='{"responses_create_params": {"input": "?"}}\n{"a": \n')
    with pytest.raises(BadRow, match=r"data/train\.jsonl:2: not valid JSON"):
        list(environment.tasks("train"))


def test_tasks_of_a_package_without_files_do_not_exist():
    with pytest.raises(UnknownSplit, match="environment 'packing' has no split 'train'; its splits: none"):
        Environment("packing", Packing()).tasks("train")


def test_every_hook_of_the_default_plugin_has_a_test():
    hooks = {name for name, value in vars(DefaultPlugin).items() if hasattr(value, "gymsdk_impl")}
    tested = {
        name.split("_")[1] for name, value in globals().items() if inspect.isfunction(value) and name[:5] == "test_"
    }
    assert hooks == tested - {"every"}
