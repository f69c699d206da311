"""An episode as text for people."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from gymsdk import Environment
from gymsdk.gym.env import Env
from gymsdk.gym.render import TranscriptPrinter
from gymsdk.gym.vector import VectorEnv
from gymsdk.types import Episode, Task

from .conftest import call

Make = Callable[..., Env]


def test_ansi_gives_the_episode_as_text(env: Make) -> None:
    counting = env(render_mode="ansi")
    counting.reset(seed=1)
    counting.step(call("add", by=3))
    counting.step("Three.")
    lines = (counting.render() or "").splitlines()
    assert lines[0].startswith("user: Count to train")
    assert lines[1:] == [
        "user: Episode 1.",
        'call: add {"by": 3}',
        'output: {"count":3}',
        "assistant: Three.",
        "reward: 1 (ended: done)",
    ]


def test_human_prints_what_is_new(env: Make, capsys: pytest.CaptureFixture[str]) -> None:
    counting = env(render_mode="human")
    counting.reset(seed=1)
    assert capsys.readouterr().out.endswith("user: Episode 1.\n")
    counting.step(call("add", by=3))
    assert capsys.readouterr().out == 'call: add {"by": 3}\noutput: {"count":3}\n'
    counting.step("Three.")
    assert capsys.readouterr().out == "assistant: Three.\nreward: 1 (ended: done)\n"
    assert counting.render() is None
    counting.reset(seed=1)
    assert capsys.readouterr().out.startswith("user: Count to train")


def test_what_many_seats_print_says_whose_it_is(host: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    vector = VectorEnv(Environment("host", host), num_envs=2, render_mode="human")
    vector.reset(seed=1)
    capsys.readouterr()
    vector.step(["One.", "Two."])
    vector.close()
    assert capsys.readouterr().out.splitlines() == [
        "slot 0: assistant: One.",
        "slot 0: reward: 0 (ended: done)",
        "slot 1: assistant: Two.",
        "slot 1: reward: 0 (ended: done)",
    ]
    assert vector.metadata["render_fps"] == Env.metadata["render_fps"]


def test_a_failure_is_rendered_in_its_words(env: Make) -> None:
    counting = env(render_mode="ansi", settings={"breaks": "verify"})
    counting.reset(seed=1)
    counting.step("Three.")
    assert (counting.render() or "").endswith("unscorable in verify: the judge is away")


def test_nothing_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    TranscriptPrinter().print_new(None)
    assert (TranscriptPrinter().format(None), capsys.readouterr().out) == ("", "")


def test_what_is_no_text_is_named(env: Make) -> None:
    counting = env()
    counting.reset(seed=1)
    episode: Episode | None = counting.episode
    assert episode is not None
    parts = [{"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": "data:"}]
    episode.transcript.opening = [{"role": "user", "content": parts}]
    episode.transcript.items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}]
    assert TranscriptPrinter().format(episode) == "user: Look: [input_image]\nreasoning: Hm."


def test_an_empty_task_is_shown(env: Make) -> None:
    counting = env(render_mode="ansi", tasks=[Task.ask("")])
    counting.reset(seed=3)
    assert counting.render() == "user: \nuser: Episode 3."
