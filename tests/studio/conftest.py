"""A running viewer, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gymsdk.jsonl import dump_row, read_rows

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class Viewer:
    """A running `gymsdk view`."""

    base: str
    token: str
    process: subprocess.Popen[str]
    folder: Path = Path()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base, headers={"Authorization": f"Bearer {self.token}"}, timeout=30)


View = Callable[..., Viewer]


@contextmanager
def start_viewer(
    *runs: Path, cache: Path, cwd: Path | None = None, options: Sequence[str] = (), prefix: Sequence[str] = ()
) -> Iterator[Viewer]:
    command = [*prefix, sys.executable, "-m", "gymsdk", "view", *map(str, runs), "--no-browser", *options]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    log = cache.parent / "viewer.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=cwd
        ) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "gymsdk view ended at once"
        base, _, token = address.partition("/#token=")
        assert token, address
        try:
            yield Viewer(base, token, process)
        finally:
            process.terminate()
            process.wait(20)
            # Open pages follow their runs by streams, and their end is no error.
            assert log.read_text() == ""


def play(folder: Path, model: str, *, limit: int = 20, repeats: int = 2) -> Path:
    options = ["tool_call", "multineedle", "--split", "train", "--limit", str(limit), "--repeats", str(repeats)]
    command = [sys.executable, "-m", "gymsdk", "rollout", *options, "--model", model, "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the policy solves half of the tasks."""
    return play(tmp_path_factory.mktemp("runs") / "weak", "scripted/oracle:0.5")


@pytest.fixture(scope="session")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same tasks in which the policy solves most of them."""
    return play(tmp_path_factory.mktemp("runs") / "strong", "scripted/oracle:0.9")


@pytest.fixture
def run(weak: Path, tmp_path: Path) -> Path:
    """Return a copy of the weak run, which the test may change, with one failed rollout."""
    return copy_run(weak, tmp_path / "run")


def copy_run(weak: Path, folder: Path) -> Path:
    """Return a copy of a run in which one rollout is about mathematics, and one has failed."""
    shutil.copytree(weak, folder)
    lines = [line for _, line in read_rows(weak / "rollouts.jsonl")]
    maths = next(line for line in lines if line["gymsdk"]["environment"] == "multineedle" and line["reward"] == 1)
    formulas = r"If \(x^2 = 4\) and $x > 0$, then $$x = \sqrt{4} = 2.$$ \boxed{2}"
    maths["response"]["output"] = [{"type": "message", "role": "assistant", "content": formulas}]
    maths["gymsdk"] |= {"environment": "math", "verdict": ["extracted_answer"]}
    maths["extracted_answer"] = "2"
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    line = next(dict(line) for line in lines if line["gymsdk"]["id"] == "0:0")
    line["gymsdk"] = dict(line["gymsdk"])
    for key in ("reward", "reward_components"):
        line.pop(key, None)
    failure = {"class": "model_timeout", "stage": "model", "message": "no answer within 5 s", "terminal": True}
    line |= {f"_ng_failure_{name}": value for name, value in failure.items()} | {"_ng_rollout_index": 7}
    line["gymsdk"] |= {"outcome": "failed", "id": "0:7"}
    (folder / "failures.jsonl").write_bytes(dump_row(line))
    return folder


@pytest.fixture(scope="session")
def shared_run(weak: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the weak run, which no test changes, with one failed rollout."""
    return copy_run(weak, tmp_path_factory.mktemp("shared") / "run")


@pytest.fixture(scope="session")
def changing(weak: Path, shared_run: Path) -> Path:
    """Return a copy of the weak run to which tests add lines and notes."""
    return copy_run(weak, shared_run.with_name("changing"))


@pytest.fixture(scope="session")
def shared_viewer(shared_run: Path, strong: Path, changing: Path) -> Iterator[Viewer]:
    """Return a viewer of the runs `run` and `strong`, which no test changes, and `changing`."""
    with start_viewer(shared_run, strong, changing, cache=shared_run.parent / "cache") as started:
        yield started


@pytest.fixture(scope="session")
def shared_playing_viewer(weak: Path, sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """Return a viewer with a tokenizer of the runs below a folder, `weak` and `sampled`, that plays rollouts again."""
    folder = tmp_path_factory.mktemp("playing")
    for run in (weak, sampled):
        shutil.copytree(run, folder / "rollouts" / run.name)
    options = ["--play", "--tokenizer", "bytes"]
    with start_viewer(cache=folder / "cache", cwd=folder, options=options) as started, started.client() as client:
        client.get("/api/runs").raise_for_status()
        yield replace(started, folder=folder)


@pytest.fixture
def viewer(run: Path, strong: Path, tmp_path: Path) -> Iterator[Viewer]:
    """Return a viewer of two runs, `run` and `strong`."""
    with start_viewer(run, strong, cache=tmp_path / "cache") as started:
        yield started


TOKENS = "Hé [end]"
"""The text with the bytes that are the token ids of an item."""


@pytest.fixture(scope="session")
def sampled(weak: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with one rollout and a reply that has token ids and log-probabilities."""
    [line] = [line for _, line in read_rows(weak / "rollouts.jsonl") if line["gymsdk"]["id"] == "0:0"][:1]
    ids = list(TOKENS.encode())
    line["response"]["output"][-1] |= {
        "generation_token_ids": ids,
        "generation_log_probs": [-0.5 * n for n in range(len(ids))],
    }
    folder = tmp_path_factory.mktemp("tokens") / "sampled"
    folder.mkdir()
    (folder / "rollouts.jsonl").write_bytes(dump_row(line))
    return folder


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Return a real browser."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install 'gymsdk[browser]'")
    if (path := shutil.which("chromium")) is None:
        pytest.skip("Chromium is not installed; `apt-get install chromium`")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()
