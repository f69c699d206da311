"""The `reset` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pydantic import Field

from gymsdk import Environment, Failed, Message, Reset, State, Task, hookimpl, play
from gymsdk.errors import BadRow

from .environments import Count, Judge, Question, Settings, Tooled


async def test_reset_receives_the_task_the_seed_the_config_and_the_shared_value(recorded, recorder):
    episode = await recorded.reset({"responses_create_params": {"input": "?"}, "answer": 7}, seed=5)
    assert recorder.given["reset"] == {
        "task": Question.ask("?", answer=7).model_copy(update={"responses_create_params": {"input": "?"}}),
        "seed": 5,
        "config": Settings(level=3),
        "shared": "index 3",
    }
    assert episode.state == Count()


async def test_reset_adds_its_messages_to_the_prompt_of_the_row(task):
    class AddsMessages(Judge):
        @hookimpl
        def reset(self):
            return Reset(messages=["Think.", Message(role="system", content="Be brief.")])

    episode = await Environment("opens", AddsMessages()).reset(task)
    assert episode.transcript.opening == [
        *task.input,
        {"type": "message", "role": "user", "content": "Think."},
        {"type": "message", "role": "system", "content": "Be brief."},
    ]


class Table(State):
    """A state with flat and nested containers."""

    names: list[str] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    cells: list[list[int]] = Field(default_factory=list)
    other: list[list[int]] = Field(default_factory=list)


class Shares(Judge):
    """An environment with one state for all episodes, by mistake."""

    def __init__(self, state) -> None:
        self.state = state

    @hookimpl
    def reset(self):
        return Reset.model_construct(state=self.state)


@pytest.mark.parametrize("name", ["names", "counts", "cells", "other"])
async def test_no_container_of_a_state_is_shared_between_episodes(task, name):
    original = Table(names=["a"], counts={"a": 1}, cells=[[1]])
    environment = Environment("shares", Shares(original))
    one, other = await environment.reset(task), await environment.reset(task)
    assert one.state == other.state == original
    copies = [getattr(state, name) for state in (one.state, other.state, original)]
    assert len({*map(id, copies)}) == 3
    if name == "cells":
        assert len({id(cells[0]) for cells in copies}) == 3


async def test_two_fields_that_share_a_list_share_it_in_the_copy(task):
    original = Table()
    vars(original)["names"] = vars(original)["other"] = shared = ["a"]
    copied = vars((await Environment("shares", Shares(original)).reset(task)).state)
    assert copied["names"] is copied["other"]
    assert copied["names"] is not shared


async def test_a_state_that_cannot_be_copied_is_rejected(task):
    class Locked(State):
        lock: Any

    message = r"the state that `reset` returned cannot be copied .*; keep handles in `shared`"
    with pytest.raises(Failed, match=message) as caught:
        await Environment("locks", Shares(Locked(lock=threading.Lock()))).reset(task)
    assert (caught.value.stage, caught.value.kind) == ("reset", "bad_answer")


@pytest.mark.parametrize(
    ("row", "offered", "names"),
    [
        ({}, None, ["go", "stop"]),
        ({"tools": []}, None, ["go", "stop"]),
        ({"tools": None}, ["stop"], ["stop"]),
        ({}, [], []),
        ({"tools": [{"type": "function", "name": "other"}, {"type": "web_search"}]}, ["stop"], ["other"]),
    ],
)
async def test_reset_offers_the_tools_of_the_row_or_else_its_own_or_else_all(row, offered, names):
    task = Task(responses_create_params={"input": "?", **row})
    episode = await Environment("tooled", Tooled(offered)).reset(task)
    assert [tool["name"] for tool in episode.tools] == names


async def test_reset_rejects_a_row_that_does_not_fit(recorded):
    with pytest.raises(BadRow, match="the row does not fit environment 'recorded': answer: Input should be a valid in"):
        await recorded.reset({"responses_create_params": {"input": "?"}, "answer": "many"})


async def test_a_task_schema_that_raises_means_that_the_row_does_not_fit(environment):
    raising = environment("""
from pydantic import field_validator
class Odd(Task):
    key: str = ""
    @field_validator("key")
    @classmethod
    def look_up(cls, value): return {}[value]
@hookimpl
def verify(task: Odd): ...
""")
    with pytest.raises(BadRow, match="environment 'made': its schema raised KeyError: 'x'"):
        raising.read({"responses_create_params": {"input": "?"}, "key": "x"})


async def test_the_hooks_of_an_episode_get_its_id_or_else_a_generated_one(environment, policy, task):
    source = "ids = []\n@hookimpl\ndef tools(): return []\n"
    for hook, answer in (
        ("reset", "Reset()"),
        ("step", "Step(done=True)"),
        ("verify", "Verdict(reward=1.0)"),
        ("close", "None"),
        ("solve", "Message(content='4')"),
    ):
        source += (
            f"@hookimpl\nasync def {hook}(episode_id):\n    ids.append(('{hook}', episode_id))\n    return {answer}\n"
        )
    named = environment(source)
    assert (await play(named, policy("4"), task, id="3:1")).failure is None
    assert named.plugin.ids == [(hook, "3:1") for hook in ("reset", "step", "verify", "close")]
    named.plugin.ids.clear()
    for _ in range(2):
        episode = await named.reset(task)
        await named.solve(episode)
        await named.close(episode)
        assert episode.id == ""
    hooks, ids = zip(*named.plugin.ids, strict=True)
    assert hooks == ("reset", "solve", "close") * 2
    assert [len({*ids[:3]}), len({*ids[3:]}), len({*ids})] == [1, 1, 2]
