from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import PLAIN

from cli.conftest import Command
from gymsdk.cli import progress

BLOCKING = f"{PLAIN}\n@hookimpl\nasync def verify():\n    time.sleep(0.06)\n    return Verdict(reward=0.5)\n"


def test_without_a_terminal_progress_is_printed_at_intervals(gymsdk: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    err = gymsdk("rollout", "sums", "--limit", 2, "-o", "out", "--concurrency", 1).err
    assert err == "1 of 2 rollouts, reward 1.000, failed 0\n2 of 2 rollouts, reward 1.000, failed 0\n"


def test_the_mean_includes_rewards_of_the_resumed_run(
    gymsdk: Command, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    arguments = ("rollout", "sums", "--limit", 2, "-o", "out", "--concurrency", 1)
    gymsdk(*arguments)
    rollouts = workdir / "out" / "rollouts.jsonl"
    first = rollouts.read_text().splitlines()[0].replace('"reward":1.0', '"reward":0.5')
    rollouts.write_text(f"{first}\n")
    err = gymsdk(*arguments, "--resume").err
    assert err == "resumed: 1 of 2 rollouts were finished before\n2 of 2 rollouts, reward 0.750, failed 0\n"


def test_similar_warnings_are_shown_five_times(gymsdk: Command, installed: Callable[..., Path]) -> None:
    installed("holding", BLOCKING)
    err = gymsdk("rollout", "holding", "--limit", 8, "-o", "out").err
    assert err.count("held the event loop for") == 5
    assert err.count("(further warnings of this kind are not shown)") == 1
    assert logging.getLogger("gymsdk").handlers == []


def test_warnings_about_different_hooks_are_counted_separately(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("gymsdk")
    with progress.show_warnings():
        for _ in range(2 * progress.MAX_SIMILAR_WARNINGS):
            log.warning("%s held the event loop for %.0f ms", "hook 'verify'", 70)
        log.warning("%s held the event loop for %.0f ms", "hook 'step'", 70)
    err = capfd.readouterr().err
    assert (err.count("'verify'"), err.count("'step'")) == (progress.MAX_SIMILAR_WARNINGS, 1)


def test_warnings_with_one_message_are_limited(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("gymsdk")
    with progress.show_warnings():
        for number in range(2 * progress.MAX_WARNING_KINDS):
            log.warning("episode %s: it broke", number)
        log.warning("something else")
    err = capfd.readouterr().err
    assert (err.count("it broke"), err.count("not shown"), err.count("something else")) == (
        progress.MAX_WARNING_KINDS,
        1,
        1,
    )
