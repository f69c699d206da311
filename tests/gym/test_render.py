"""An episode rendered as text for people."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from gymsdk import Environment
from gymsdk.gym.env import Env, TranscriptPrinter
from gymsdk.gym.vector import VectorEnv
from gymsdk.types import Episode, Task

from .conftest import call

Make = Callable[..., Env]


def test_ansi_mode_returns_the_episode_as_text(env: Make) -> None:
    counter = env(render_mode="ansi")
    counter.reset(seed=1)
    counter.step(call("add", by=3))
    counter.step("Three.")
    lines = (counter.render() or "").splitlines()
    assert lines[0].startswith("user: Count to train")
    assert lines[1:] == [
        "user: Episode 1.",
        'call: add {"by": 3}',
        'output: {"count":3}',
        "assistant: Three.",
        "reward: 1 (ended: done)",
    ]


def test_human_mode_prints_what_is_new(env: Make, capsys: pytest.CaptureFixture[str]) -> None:
    counter = env(render_mode="human")
    counter.reset(seed=1)
    assert capsys.readouterr().out.endswith("user: Episode 1.\n")
    counter.step(call("add", by=3))
    assert capsys.readouterr().out == 'call: add {"by": 3}\noutput: {"count":3}\n'
    counter.step("Three.")
    assert capsys.readouterr().out == "assistant: Three.\nreward: 1 (ended: done)\n"
    assert counter.render() is None
    counter.reset(seed=1)
    assert capsys.readouterr().out.startswith("user: Count to train")


def test_lines_of_a_vector_name_their_slot(host: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    vector = VectorEnv(Environment("host", host), num_envs=2, render_mode="human", autoreset_mode="same_step")
    vector.reset(seed=1)
    capsys.readouterr()
    vector.step(["One.", "Two."])
    vector.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "slot 0: assistant: One.",
        "slot 0: reward: 0 (ended: done)",
        "slot 1: assistant: Two.",
        "slot 1: reward: 0 (ended: done)",
    ]
    # The next episodes are shown after the ends of the last ones.
    assert lines[4].startswith("slot 0: user: Count to train")
    assert vector.metadata["render_fps"] == Env.metadata["render_fps"]


def test_a_failure_is_rendered_with_its_message(env: Make) -> None:
    counter = env(render_mode="ansi", settings={"breaks": "verify"})
    counter.reset(seed=1)
    counter.step("Three.")
    assert (counter.render() or "").endswith("unscorable in verify: the judge is away")


def test_a_part_that_is_not_text_is_named(env: Make, capsys: pytest.CaptureFixture[str]) -> None:
    counter = env(render_mode="ansi", tasks=[Task.ask("")])
    counter.reset(seed=3)
    assert counter.render() == "user: \nuser: Episode 3."
    episode: Episode | None = counter.episode
    assert episode is not None
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": "data:"}]
    episode.transcript.opening = [{"role": "user", "content": parts}]
    episode.transcript.items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}]
    assert TranscriptPrinter().format(episode) == "user: Look: [input_image]\nreasoning: Hm."
    TranscriptPrinter().print_new(None)
    assert (TranscriptPrinter().format(None), capsys.readouterr().out) == ("", "")
