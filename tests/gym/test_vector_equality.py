"""A vector of seats does, action for action, what as many single environments do."""

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

SEATS = 3


class Riddle(Task):
    number: int


class Memory(State):
    notes: list[str] = Field(default_factory=list)


class Graded(Verdict):
    odd: object = None
    parts: dict[str, object] = Field(default_factory=dict)


ODD = [None, 1, "one", 0.5, [1, None], {"a": 1, "_b": None}, {"a": "one"}, 2**70, True, float("inf")]


class Odd:
    """Every task has its own ending: verdicts of every shape, some that break, one that cannot even be opened."""

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
        said = len(state.notes) / 2
        parts = {name: ODD[(task.number + len(name)) % len(ODD)] for name in state.notes}
        return Graded(
            reward=said, components={f"_{note}": 0.5 for note in state.notes}, odd=ODD[task.number], parts=parts
        )


def _calls(*calls: tuple[str, str]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": each} for each in functions],
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

SPOKEN = [*ACTIONS, {"role": "assistant", "content": "more of it"}, [{"type": "reasoning", "summary": []}]]

AUTORESET_MODES = list(AutoresetMode)


class Sync(SyncVectorEnv):
    """Gymnasium's own vector over single environments, its infos left as they are: each seat's, by its number."""

    def _add_info(self, vector_infos: dict[Any, Any], env_info: dict[str, Any], env_num: int) -> dict[Any, Any]:
        vector_infos.setdefault(env_num, {}).update(env_info)
        return vector_infos


@pytest.fixture(scope="module")
def odd() -> Environment:
    return Environment("odd", Odd())


def scripts(actions: list[Any]) -> st.SearchStrategy[list[list[Any]]]:
    turn = st.lists(st.sampled_from(actions), min_size=SEATS, max_size=SEATS)
    return st.lists(turn, min_size=1, max_size=8)


seeds = st.one_of(st.integers(0, 2**31), st.lists(st.integers(0, 99), min_size=SEATS, max_size=SEATS))


@pytest.mark.parametrize("mode", AUTORESET_MODES)
@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
@settings(max_examples=25, deadline=None)
@given(seed=seeds, script=scripts(ACTIONS))
def test_it_equals_gymnasiums_own_vector_of_single_environments(
    odd: Environment, mode: AutoresetMode, codec: str, seed: int | list[int], script: list[list[Any]]
) -> None:
    script = [[_said(action, codec) for action in actions] for actions in script]
    ours = VectorEnv(odd, num_envs=SEATS, autoreset_mode=mode.name.lower(), codec=codec, turns=4)
    theirs = Sync([lambda: Env(odd, codec=codec, turns=4) for _ in range(SEATS)], autoreset_mode=mode)
    _same(ours.reset(seed=seed), theirs.reset(seed=seed))
    for actions in script:
        one, other = ours.step(actions), theirs.step(tuple(actions))
        _same(one, other)
        over = np.logical_or(one[2], one[3])
        if mode is AutoresetMode.DISABLED and over.any():
            masks = [{"reset_mask": over.copy(), "split": "test"} for _ in range(2)]
            _same(ours.reset(options=masks[0]), theirs.reset(options=masks[1]))
    ours.close()
    theirs.close()


@settings(max_examples=25, deadline=None)
@given(seed=seeds, script=scripts(SPOKEN))
def test_it_equals_single_environments_with_its_seeds(
    odd: Environment, seed: int | list[int], script: list[list[Any]]
) -> None:
    vector, singles = VectorEnv(odd, num_envs=SEATS), [Env(odd) for _ in range(SEATS)]
    seeded = seed if isinstance(seed, list) else [seed + index for index in range(SEATS)]
    seen, infos = vector.reset(seed=seed)
    for index, single in enumerate(singles):
        assert single.reset(seed=seeded[index]) == (seen[index], get_info(infos, index))
    fresh = [False] * SEATS
    for actions in script:
        stepped = vector.step(actions)
        for index, single in enumerate(singles):
            alone = (*single.reset(), 0.0) if fresh[index] else single.step(actions[index])
            _same_seat(stepped, index, alone)
            fresh[index] = bool(stepped[2][index] or stepped[3][index])
    vector.close()
    for single in singles:
        single.close()


def _said(action: Any, codec: str) -> Any:
    """Give the action in the words of *codec*, calls in the Hermes form."""
    if codec == "chat":
        return action
    text = action if isinstance(action, str) else "".join(map(_hermes, action.get("tool_calls", [])))
    return text if codec == "text" else list(text.encode())


def _hermes(call: dict[str, Any]) -> str:
    return '<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.format(**call["function"])


def _same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    *arrays, infos = ours
    *expected, told = theirs
    assert list(arrays[0]) == list(expected[0])
    for one, other in zip(arrays[1:], expected[1:], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other, equal_nan=True)
    assert [get_info(infos, index) for index in range(SEATS)] == [told.get(index, {}) for index in range(SEATS)]


def _same_seat(stepped: tuple[Any, ...], index: int, alone: Sequence[Any]) -> None:
    seen, rewards, terminated, truncated, infos = stepped
    if len(alone) == 3:
        alone = (alone[0], alone[2], False, False, alone[1])
    mine = (seen[index], rewards[index], terminated[index], truncated[index], get_info(infos, index))
    assert repr(mine[0]) == repr(alone[0])
    assert np.array_equal([mine[1]], [alone[1]], equal_nan=True)
    assert (bool(mine[2]), bool(mine[3])) == alone[2:4]
    assert mine[4] == alone[4]
