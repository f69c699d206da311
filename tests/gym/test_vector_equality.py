"""A `VectorEnv` behaves, action for action, like as many single environments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from gymsdk import Environment, Message, Reset, State, Step, Task, ToolCall, Unscorable, Verdict, hookimpl
from gymsdk.gym.env import Env
from gymsdk.gym.vector import VectorEnv, get_info

SLOTS = 3


class Riddle(Task):
    number: int


class Memory(State):
    notes: list[str] = Field(default_factory=list)


class Graded(Verdict):
    varied: object = None
    parts: dict[str, object] = Field(default_factory=dict)


ODD = [None, 1, "one", 0.5, [1, None], {"a": 1, "_b": None}, {"a": "one"}, 2**70, True, float("inf")]


class VariedEnvironment:
    """Tasks that end in different ways: verdicts of many shapes, failing verifiers and failing resets."""

    @hookimpl
    def tasks(self, split: Literal["train", "test"], seed: int) -> Iterator[Task]:
        rng = random.Random(f"{split}:{seed}")
        while True:
            yield Riddle.ask(f"{split} {rng.randrange(1000)}", number=rng.randrange(13))

    @hookimpl
    def reset(self, task: Riddle, seed: int) -> Reset:
        if task.number == 12:
            raise ValueError("no riddle today")
        return Reset(state=Memory(), messages=[f"begin {seed}"], tools=["note", "smash"][: task.number])

    @hookimpl
    def tools(self) -> list[Any]:
        async def note(text: str, state: Memory) -> list[str]:
            """Keep a note."""
            await asyncio.sleep(0)
            state.notes.append(text)
            return state.notes

        def smash() -> None:
            """Break it."""
            raise RuntimeError("broken")

        return [note, smash]

    @hookimpl
    def step(self, action: Message | ToolCall, state: Memory) -> Step | None:
        if isinstance(action, Message) and action.text.startswith("more"):
            return Step(messages=[f"{action.text}? {len(state.notes)}"], reward=0.25)
        if isinstance(action, Message) and action.text.startswith("hush"):
            return Step()
        return None

    @hookimpl
    def verify(self, task: Riddle, state: Memory) -> Verdict:
        if task.number == 10:
            raise Unscorable("nobody knows")
        if task.number == 11:
            raise ZeroDivisionError
        reward = len(state.notes) / 2
        parts = {name: ODD[(task.number + len(name)) % len(ODD)] for name in state.notes}
        return Graded(
            reward=reward, components={f"_{note}": 0.5 for note in state.notes}, varied=ODD[task.number], parts=parts
        )


def _calls(*calls: tuple[str, str]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


ACTIONS: list[Any] = [
    "more",
    "more, 你好 😀",
    "enough",
    "hush",
    "",
    _calls(("note", '{"text": "naïve"}')),
    _calls(("note", '{"text": "a"}'), ("note", '{"text": "bb"}')),
    _calls(("note", '{"text": 1')),
    _calls(("smash", "{}")),
    _calls(("unknown", "{}")),
]

CHAT_ACTIONS = [*ACTIONS, {"role": "assistant", "content": "more of it"}, [{"type": "reasoning", "summary": []}]]

AUTORESET_MODES = list(AutoresetMode)


class Sync(SyncVectorEnv):
    """Gymnasium's own vector of single environments; it keeps each info unchanged under the index of its slot."""

    def _add_info(self, vector_infos: dict[Any, Any], env_info: dict[str, Any], env_num: int) -> dict[Any, Any]:
        vector_infos.setdefault(env_num, {}).update(env_info)
        return vector_infos


@pytest.fixture(scope="module")
def varied() -> Environment:
    return Environment("odd", VariedEnvironment())


def scripts(actions: list[Any]) -> st.SearchStrategy[list[list[Any]]]:
    turn = st.lists(st.sampled_from(actions), min_size=SLOTS, max_size=SLOTS)
    return st.lists(turn, min_size=1, max_size=8)


seeds = st.one_of(st.integers(0, 2**31), st.lists(st.integers(0, 99), min_size=SLOTS, max_size=SLOTS))


@pytest.mark.parametrize("mode", AUTORESET_MODES)
@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
@settings(max_examples=25, deadline=None)
@given(seed=seeds, script=scripts(ACTIONS))
def test_it_equals_gymnasiums_vector_of_single_environments(
    varied: Environment, mode: AutoresetMode, codec: str, seed: int | list[int], script: list[list[Any]]
) -> None:
    script = [[_encode(action, codec) for action in actions] for actions in script]
    ours = VectorEnv(varied, num_envs=SLOTS, autoreset_mode=mode.name.lower(), codec=codec, turns=4)
    reference = Sync([lambda: Env(varied, codec=codec, turns=4) for _ in range(SLOTS)], autoreset_mode=mode)
    _assert_same(ours.reset(seed=seed), reference.reset(seed=seed))
    for actions in script:
        one, other = ours.step(actions), reference.step(tuple(actions))
        _assert_same(one, other)
        over = np.logical_or(one[2], one[3])
        if mode is AutoresetMode.DISABLED and over.any():
            masks = [{"reset_mask": over.copy(), "split": "test"} for _ in range(2)]
            _assert_same(ours.reset(options=masks[0]), reference.reset(options=masks[1]))
    ours.close()
    reference.close()


@settings(max_examples=25, deadline=None)
@given(seed=seeds, script=scripts(CHAT_ACTIONS))
def test_it_equals_single_environments_with_the_same_seeds(
    varied: Environment, seed: int | list[int], script: list[list[Any]]
) -> None:
    vector, singles = VectorEnv(varied, num_envs=SLOTS), [Env(varied) for _ in range(SLOTS)]
    seeded = seed if isinstance(seed, list) else [seed + index for index in range(SLOTS)]
    observations, infos = vector.reset(seed=seed)
    for index, single in enumerate(singles):
        assert single.reset(seed=seeded[index]) == (observations[index], get_info(infos, index))
    fresh = [False] * SLOTS
    for actions in script:
        stepped = vector.step(actions)
        for index, single in enumerate(singles):
            alone = (*single.reset(), 0.0) if fresh[index] else single.step(actions[index])
            _assert_same_slot(stepped, index, alone)
            fresh[index] = bool(stepped[2][index] or stepped[3][index])
    vector.close()
    for single in singles:
        single.close()


def _encode(action: Any, codec: str) -> Any:
    """Return the action as *codec* expects it, with tool calls in the Hermes format."""
    if codec == "chat":
        return action
    text = action if isinstance(action, str) else "".join(map(_hermes, action.get("tool_calls", [])))
    return text if codec == "text" else list(text.encode())


def _hermes(call: dict[str, Any]) -> str:
    return '<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.format(**call["function"])


def _assert_same(ours: tuple[Any, ...], reference: tuple[Any, ...]) -> None:
    *arrays, infos = ours
    *expected, expected_infos = reference
    assert list(arrays[0]) == list(expected[0])
    for one, other in zip(arrays[1:], expected[1:], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other, equal_nan=True)
    assert [get_info(infos, index) for index in range(SLOTS)] == [
        expected_infos.get(index, {}) for index in range(SLOTS)
    ]


def _assert_same_slot(stepped: tuple[Any, ...], index: int, alone: Sequence[Any]) -> None:
    observations, rewards, terminated, truncated, infos = stepped
    if len(alone) == 3:
        alone = (alone[0], alone[2], False, False, alone[1])
    actual = (observations[index], rewards[index], terminated[index], truncated[index], get_info(infos, index))
    assert repr(actual[0]) == repr(alone[0])
    assert np.array_equal([actual[1]], [alone[1]], equal_nan=True)
    assert (bool(actual[2]), bool(actual[3])) == alone[2:4]
    assert actual[4] == alone[4]
