"""What an environment says that its codec has no words for fails its own episode, and nobody else's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gymsdk import Environment
from gymsdk.errors import UsageError
from gymsdk.gym.env import Env
from gymsdk.gym.vector import VectorEnv, get_info
from gymsdk.tokens.tokenizer import ByteTokenizer

LOOKS = """
PICTURE = {"type": "input_image", "image_url": "data:,"}

async def look(at: str) -> list:
    "Look."
    return [PICTURE if at == "picture" else {"type": "input_text", "text": "words"}]

@hookimpl
def tools():
    return [look]

@hookimpl
def step(action):
    if isinstance(action, Message):
        return Step(done=action.text.startswith("stop"), messages=["bye"] if action.text == "stop" else [])

@hookimpl
def verify(transcript):
    return Verdict(reward=float(len(transcript.calls())))
"""

CALL = '<tool_call>{"name": "look", "arguments": {"at": "%s"}}</tool_call>'
SAMPLE_WORDS = {"responses_create_params": {"input": "Look around."}}
PICTURE = {
    "responses_create_params": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    }
}
BROKEN = {"responses_create_params": {"input": [{"role": "user", "content": 5}]}}


@pytest.fixture
def looks(environment: Callable[..., Environment]) -> Environment:
    return environment(LOOKS)


def said(codec: str, text: str) -> Any:
    return text if codec == "text" else ByteTokenizer().encode(text)


@pytest.mark.parametrize("codec", ["text", "tokens"])
def test_an_output_that_is_no_text_fails_the_step_of_its_own_seat(looks: Environment, codec: str) -> None:
    vector = VectorEnv(looks, num_envs=2, tasks=[SAMPLE_WORDS], codec=codec)
    vector.reset(seed=0)
    seen, rewards, terminated, truncated, infos = vector.step([said(codec, CALL % at) for at in ("picture", "else")])
    assert (list(terminated), list(truncated)) == ([False, False], [True, False])
    assert np.array_equal(rewards, [math.nan, 0.0], equal_nan=True)
    assert len(seen[0]) == 0 < len(seen[1])
    failure = get_info(infos, 0)["failure"]
    assert (failure["stage"], failure["kind"]) == ("step", "unspeakable")
    assert "use codec='chat' to carry it" in failure["message"]
    assert not get_info(infos, 1)
    assert vector.step([said(codec, "stop")] * 2)[1][1] == 1.0
    vector.close()


@pytest.mark.parametrize("codec", ["text", "tokens"])
@pytest.mark.parametrize("task", [PICTURE, BROKEN], ids=["picture", "no content"])
def test_an_opening_that_is_no_text_is_told_at_the_reset_and_ends_the_first_step(
    looks: Environment, codec: str, task: Any
) -> None:
    env = Env(looks, tasks=[SAMPLE_WORDS], codec=codec)
    seen, info = env.reset(options={"task": task})
    assert (info["failure"]["stage"], info["failure"]["kind"]) == ("reset", "unspeakable")
    assert env.observation_space.contains(seen)
    _, reward, terminated, truncated, info = env.step(said(codec, "stop"))
    assert (math.isnan(reward), terminated, truncated, info["outcome"]) == (True, False, True, "failed")
    env.reset(seed=1)
    assert env.step(said(codec, "stop"))[1:3] == (0.0, True)
    env.close()


def test_a_reset_in_the_same_step_loses_no_reward(looks: Environment) -> None:
    vector = VectorEnv(looks, num_envs=2, tasks=[SAMPLE_WORDS, PICTURE], codec="text", autoreset_mode="same_step")
    vector.reset(options={"task": 0}, seed=0)
    outcomes = []
    for _ in range(12):
        _, rewards, terminated, truncated, infos = vector.step(["stop"] * 2)
        assert all(terminated | truncated)
        assert list(np.isnan(rewards)) == list(truncated) == list(infos["final_info"]["outcome"] == "failed")
        outcomes += list(infos["final_info"]["outcome"])
    assert set(outcomes) == {"scored", "failed"}
    vector.close()


class Strict(ByteTokenizer):
    """Its template wants a user first."""

    def apply_chat_template(self, messages, /, *, tools=None, add_generation_prompt=False):
        if not any(message["role"] == "user" for message in messages):
            raise ValueError("no user query found")
        return super().apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def test_a_template_that_cannot_even_write_nothing_fails_the_episode(looks: Environment) -> None:
    env = Env(looks, tasks=[SAMPLE_WORDS], codec="tokens", tokenizer=Strict())
    seen, info = env.reset(options={"task": PICTURE})
    assert (seen, info["failure"]["kind"]) == ([], "unspeakable")
    env.close()


def test_an_action_that_is_none_is_the_callers_affair(looks: Environment) -> None:
    env = Env(looks, tasks=[SAMPLE_WORDS], codec="text")
    env.reset(seed=0)
    with pytest.raises(UsageError, match="must be a string"):
        env.step(5)
    assert env.step("stop")[2]
    env.close()


@pytest.mark.parametrize("codec", ["text", "tokens"])
def test_a_silent_environment_leaves_the_turns_apart(looks: Environment, codec: str) -> None:
    env = Env(looks, tasks=[SAMPLE_WORDS], codec=codec)
    sequence, _ = env.reset(seed=0)
    for text in ("one<|im_end|>", "two", "stop"):
        action = (
            text
            if codec == "text"
            else [*ByteTokenizer().encode(text.removesuffix("<|im_end|>")), 258][: len(text) + 1]
        )
        seen, _, terminated, _, _ = env.step(action)
        sequence = sequence + action + seen
    assert terminated
    whole = sequence if codec == "text" else ByteTokenizer().decode(sequence)
    assert whole.partition("</tool_call><|im_end|>\n")[2] == (
        "<|im_start|>user\nLook around.<|im_end|>\n"
        "<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nstop<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n"
    )
    env.close()
