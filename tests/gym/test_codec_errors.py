"""Content that a codec cannot express fails only the episode it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gymsdk import Environment
from gymsdk.errors import BadRow, UsageError
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
TEXT_TASK = {"responses_create_params": {"input": "Look around."}}
PICTURE = {
    "responses_create_params": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    }
}
BROKEN = {"responses_create_params": {"input": [{"role": "user", "content": 5}]}}


@pytest.fixture
def looks(environment: Callable[..., Environment]) -> Environment:
    return environment(LOOKS)


def encode(codec: str, text: str) -> Any:
    return text if codec == "text" else ByteTokenizer().encode(text)


@pytest.mark.parametrize("codec", ["text", "tokens"])
def test_an_output_that_is_not_text_fails_the_step_of_its_own_slot(looks: Environment, codec: str) -> None:
    vector = VectorEnv(looks, num_envs=2, tasks=[TEXT_TASK], codec=codec)
    vector.reset(seed=0)
    observation, rewards, terminated, truncated, infos = vector.step(
        [encode(codec, CALL % at) for at in ("picture", "else")]
    )
    assert (list(terminated), list(truncated)) == ([False, False], [True, False])
    assert np.array_equal(rewards, [math.nan, 0.0], equal_nan=True)
    assert len(observation[0]) == 0 < len(observation[1])
    failure = get_info(infos, 0)["failure"]
    assert (failure["stage"], failure["kind"]) == ("step", "unspeakable")
    assert "use codec='chat' to carry it" in failure["message"]
    assert not get_info(infos, 1)
    assert vector.step([encode(codec, "stop")] * 2)[1][1] == 1.0
    vector.close()


@pytest.mark.parametrize("codec", ["text", "tokens"])
def test_an_opening_that_is_not_text_is_reported_at_reset_and_ends_the_first_step(
    looks: Environment, codec: str
) -> None:
    env = Env(looks, tasks=[TEXT_TASK], codec=codec)
    observation, info = env.reset(options={"task": PICTURE})
    assert (info["failure"]["stage"], info["failure"]["kind"]) == ("reset", "unspeakable")
    assert env.observation_space.contains(observation)
    _, reward, terminated, truncated, info = env.step(encode(codec, "stop"))
    assert (math.isnan(reward), terminated, truncated, info["outcome"]) == (True, False, True, "failed")
    env.reset(seed=1)
    assert env.step(encode(codec, "stop"))[1:3] == (0.0, True)
    env.close()


@pytest.mark.parametrize("codec", ["chat", "text", "tokens"])
def test_an_opening_without_content_and_an_action_of_another_type_are_errors_of_the_caller(
    looks: Environment, codec: str
) -> None:
    env = Env(looks, tasks=[TEXT_TASK], codec=codec)
    with pytest.raises(BadRow, match=r"`input.0.content` must be text or a list of parts"):
        env.reset(options={"task": BROKEN})
    env.reset(seed=0)
    with pytest.raises(UsageError, match="must be"):
        env.step(5)
    assert env.step(encode(codec, "stop") if codec == "tokens" else "stop")[2]
    env.close()


def test_an_autoreset_in_the_same_step_loses_no_reward(looks: Environment) -> None:
    vector = VectorEnv(looks, num_envs=2, tasks=[TEXT_TASK, PICTURE], codec="text", autoreset_mode="same_step")
    vector.reset(options={"task": 0}, seed=0)
    outcomes = []
    for _ in range(12):
        _, rewards, terminated, truncated, infos = vector.step(["stop"] * 2)
        assert all(terminated | truncated)
        assert list(np.isnan(rewards)) == list(truncated) == list(infos["final_info"]["outcome"] == "failed")
        outcomes += list(infos["final_info"]["outcome"])
    assert set(outcomes) == {"scored", "failed"}
    vector.close()


class UserRequired(ByteTokenizer):
    """A tokenizer with a template that requires a user message."""

    def apply_chat_template(self, messages, /, *, tools=None, add_generation_prompt=False):
        if not any(message["role"] == "user" for message in messages):
            raise ValueError("no user query found")
        return super().apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt)


def test_a_template_that_rejects_an_empty_conversation_fails_the_episode(looks: Environment) -> None:
    env = Env(looks, tasks=[TEXT_TASK], codec="tokens", tokenizer=UserRequired())
    observation, info = env.reset(options={"task": PICTURE})
    assert (observation, info["failure"]["kind"]) == ([], "unspeakable")
    env.close()


@pytest.mark.parametrize("codec", ["text", "tokens"])
def test_turns_stay_separate_when_the_environment_does_not_reply(looks: Environment, codec: str) -> None:
    env = Env(looks, tasks=[TEXT_TASK], codec=codec)
    sequence, _ = env.reset(seed=0)
    for text in ("one<|im_end|>", "two", "stop"):
        action = (
            text
            if codec == "text"
            else [*ByteTokenizer().encode(text.removesuffix("<|im_end|>")), 258][: len(text) + 1]
        )
        observation, _, terminated, _, _ = env.step(action)
        sequence = sequence + action + observation
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
