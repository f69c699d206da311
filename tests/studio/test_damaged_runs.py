"""A damaged file or line is named, and neither hides other runs nor ends the thread that follows them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from gymsdk.runs.notes import RunNotes
from gymsdk.runs.source import find_run, get_default_path
from gymsdk.studio.app import _dump_state, describe_run
from gymsdk.studio.library import Library

from .conftest import start_viewer

DEEP = b"[" * 100_000 + b"]" * 100_000
NESTED = b"[" * 500 + b"]" * 500

CONTENTS = {
    "empty": b"",
    "not-json": b"{",
    "number": b"1",
    "null": b"null",
    "text": b'"text"',
    "invalid-utf-8": b'{"settings": "\xff\xfe"}',
    "lone-surrogate-key": b'{"settings": {"environments": {"\\ud800": 1}}}',
    "huge-integer": b'{"started": ' + b"9" * 5000 + b"}",
    "huge-float": b'{"started": 1e999}',
    "nan": b'{"started": NaN}',
    "deep": DEEP,
    "deep-with-surrogate": b'["\\ud800",' + DEEP + b"]",
    "nested": NESTED,
}
"""Contents that are right for neither `run.json` nor `metrics.json`."""

ABOUTS = {
    "list": b"[]",
    "nested-settings": b'{"settings": {"budget": {"a": ' + NESTED + b"}}}",
    "settings-list": b'{"settings": [1]}',
    "environments-number": b'{"settings": {"environments": 5}}',
    "environments-list": b'{"settings": {"environments": [1, null]}}',
    "environment-number": b'{"settings": {"environments": {"math": 5}}}',
    "model-object": b'{"settings": {"model": {}}}',
    "started-number": b'{"started": 12345678901234567890123}',
    "command-list": b'{"command": [1], "python": {}, "platform": 1, "resumed": 3, "distributions": []}',
}

METRICS = {
    "object": b"{}",
    "list-of-numbers": b"[1, null, []]",
    "outcomes-list": b'[{"outcomes": [1], "agent_metrics": {"mean/reward": 1}}]',
    "metrics-text": b'[{"outcomes": {"scored": 1}, "agent_metrics": "text"}]',
    "environment-list": b'[{"environment": []}]',
}


def bind_socket(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(name)


KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": lambda path: bind_socket(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
}
"""Files that are not regular. A reader would wait for a writer of a FIFO, and never reach the end of the device."""

LINES = {
    "not-json": b"{",
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "no-rollout": b'{"x": 1}',
    "invalid-utf-8": b'{"reward": 1, "response": "\xff"}',
    "lone-surrogate": b'{"reward": 1, "response": {"output": [{"type": "message", "content": "\\ud800"}]}}',
    "nan": b'{"reward": NaN, "response": {}}',
    "deep": b'{"reward": 1, "response": ' + DEEP + b"}",
    "nested": b'{"reward": 1, "response": ' + NESTED + b"}",
    "huge-integer": b'{"reward": 1, "_ng_task_index": ' + b"9" * 5000 + b"}",
    "huge-reward": b'{"reward": -1e300}',
    "turns-text": b'{"reward": 1, "gymsdk": {"turns": "many"}}',
    "turns-list": b'{"reward": 1, "gymsdk": {"turns": [1]}}',
    "ended-object": b'{"reward": 1, "gymsdk": {"ended": {}}}',
    "started-text": b'{"reward": 1, "gymsdk": {"timing": {"started": {}}}}',
}


def dump_line(task: int, reward: float) -> bytes:
    line = {"_ng_task_index": task, "_ng_rollout_index": 0, "reward": reward, "response": {"output": []}}
    return json.dumps(line | {"responses_create_params": {"input": f"task {task}"}}).encode() + b"\n"


REWARDS = [0.0, 1.0, 0.25]


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "rollouts.jsonl").write_bytes(b"".join(dump_line(*numbered) for numbered in enumerate(REWARDS)))
    return folder


def make(kind: str, path: Path) -> None:
    """Create a file that is not regular at *path*, from its folder, as the path of a socket must be short."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        KINDS[kind](path)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write runs with a damaged file each, and a sound one; return the name of the damaged file of each run."""
    folder = tmp_path_factory.mktemp("damaged") / "rollouts"
    found = {"folder": str(folder), "sound": ""}
    write_run(folder / "sound")
    for name, contents in {"run.json": CONTENTS | ABOUTS, "metrics.json": CONTENTS | METRICS}.items():
        for title, content in contents.items():
            run = write_run(folder / f"{name}-{title}")
            (run / name).write_bytes(content)
            found[run.name] = name
    for name in ("run.json", "metrics.json", "rollouts.jsonl", "failures.jsonl", "inputs.jsonl", "notes.jsonl"):
        for kind in KINDS:
            run = write_run(folder / f"{name}-{kind}")
            (run / name).unlink(missing_ok=True)
            make(kind, run / name)
            found[run.name] = name
    return found


@pytest.fixture(scope="module")
def client(damaged: dict[str, str]) -> Iterator[httpx.Client]:
    """Return a client of a viewer of all these runs."""
    folder = Path(damaged["folder"]).parent
    with start_viewer(cache=folder / "cache", cwd=folder) as viewer, viewer.client() as opened:
        yield opened


def get(client: httpx.Client, path: str) -> Any:
    answer = client.get(f"/api/{path}", timeout=10)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_damaged_files_hide_no_run(client: httpx.Client, damaged: dict[str, str]) -> None:
    listed = {run["run"]: run for run in get(client, "runs")}
    runs = {name: file for name, file in damaged.items() if name != "folder"}
    assert set(listed) == set(runs)
    for name, file in runs.items():
        files = {bad["file"] for bad in listed[name]["bad_files"]}
        assert files == ({file} if file not in {"", "notes.jsonl"} else set()), name


@pytest.mark.slow
def test_a_run_with_a_damaged_file_is_shown(client: httpx.Client, damaged: dict[str, str]) -> None:
    for name, file in damaged.items():
        if name == "folder":
            continue
        info = get(client, f"runs/{name}")
        missing = file == "rollouts.jsonl"
        assert info["summary"]["rollouts"] == (0 if missing else len(REWARDS)), name
        assert info["summary"]["mean"] == (None if missing else pytest.approx(fmean(REWARDS)))
        assert [bad["file"] for bad in info["bad_lines"]] == (["notes.jsonl"] if file == "notes.jsonl" else [])
        assert get(client, f"runs/{name}/notes") == []
        pairs = get(client, f"compare?a=sound&b={name}")["pairs"]
        assert len(pairs) == (0 if missing else len(REWARDS))


@pytest.mark.slow
def test_a_growing_run_is_followed_beside_damaged_runs(client: httpx.Client, damaged: dict[str, str]) -> None:
    run = write_run(Path(damaged["folder"]) / "growing")
    wait_for(lambda: "growing" in {info["run"] for info in get(client, "runs")})
    try:
        assert get(client, "runs/growing")["summary"]["rollouts"] == len(REWARDS)
        with (run / "rollouts.jsonl").open("ab") as file:
            file.writelines(line + b"\n" for line in LINES.values())
            file.write(dump_line(9, 0.75))
        rewards = [*REWARDS, 0.75]
        wait_for(lambda: get(client, "runs/growing")["summary"]["rollouts"] == len(rewards))
        info = get(client, "runs/growing")
        assert info["summary"]["mean"] == pytest.approx(fmean(rewards))
        [bad] = info["bad_lines"]
        first = len(REWARDS) + 1
        assert (bad["file"], bad["count"]) == ("rollouts.jsonl", len(LINES))
        assert bad["lines"] == list(range(first, first + len(LINES)))
        assert f"rollouts.jsonl:{first}" in bad["message"]
        assert get(client, "runs/growing/rows?q=task")["total"] == len(rewards)
    finally:
        shutil.rmtree(run)


@pytest.mark.parametrize("title", LINES)
def test_a_damaged_line_is_counted_and_named(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gymsdk.runs import read

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = write_run(tmp_path / "run")
    for path in (run / "rollouts.jsonl", run / "inputs.jsonl"):
        with path.open("ab") as file:
            file.write(LINES[title] + b"\n" + dump_line(5, 0.5))
    with (run / "rollouts.jsonl").open("ab") as file:
        # The brackets of a text do not nest.
        file.write(dump_line(6, 0.5).replace(b"task 6", b"[" * 1000))
    with read(run) as opened, read(write_run(tmp_path / "other")) as other:
        opened.index.update_texts()
        assert [row["reward"] for row in opened.list_rows()] == [*REWARDS, 0.5, 0.5]
        [bad] = opened.queries.list_bad_lines()
        assert (bad["file"], bad["count"], bad["lines"]) == ("rollouts.jsonl", 1, [len(REWARDS) + 1])
        assert opened.arrow("messages").num_rows == len(REWARDS) + 2
        assert len(opened.compare(other).pairs) == len(REWARDS)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"id": 5}', b'{"id": "0:0", "tags": "x"}', b'{"id": "0:0", "new": 1}']
)
def test_a_damaged_note_is_counted_and_named(content: bytes, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "notes.jsonl").write_bytes(content + b'\n{"id": "0:0", "text": "right"}\n')
    notes = RunNotes(find_run(run))
    assert [note.text for note in notes.read()] == ["right"]
    [bad] = notes.list_bad_lines()
    assert (bad["file"], bad["count"]) == ("notes.jsonl", 1)
    assert bad["message"].startswith("notes.jsonl:1: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollouts.jsonl", "run.json", "inputs.jsonl"])
def test_show_and_compare_name_a_fifo_and_end(name: str, damaged: dict[str, str], tmp_path: Path) -> None:
    folder = Path(damaged["folder"])
    for arguments in (["show", folder / f"{name}-fifo"], ["compare", folder / f"{name}-fifo", folder / "sound"]):
        done = subprocess.run(
            [sys.executable, "-m", "gymsdk", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        )
        assert f"{name}: it is a FIFO, not a regular file" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == (1 if arguments[0] == "compare" and name == "rollouts.jsonl" else 0)


def test_the_thread_survives_an_error_and_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = Library([write_run(tmp_path / "broken"), write_run(tmp_path / "sound")])
    broken, sound = library.list_runs()
    index = get_default_path(broken.source)
    library.start()
    try:
        with caplog.at_level(logging.WARNING, logger="gymsdk"):
            for run in (broken, sound):
                assert run.build_state()["rollouts"] == len(REWARDS)
            for file in index.parent.glob(f"{index.name}*"):
                file.unlink()
            index.mkdir()
            wait_for(lambda: broken.error)
            assert _dump_state(broken) == b""
            assert "cannot be followed" in describe_run(broken)["bad_files"][0]["message"]
            for folder in ("broken", "sound"):
                with (tmp_path / folder / "rollouts.jsonl").open("ab") as file:
                    file.write(dump_line(7, 1.0))
            wait_for(lambda: sound.build_state()["rollouts"] == len(REWARDS) + 1)
            time.sleep(1)
        assert len([record for record in caplog.records if "broken" in record.getMessage()]) == 1
        index.rmdir()
        wait_for(lambda: not broken.error)
        assert broken.build_state()["rollouts"] == len(REWARDS) + 1
    finally:
        library.stop()


@pytest.mark.slow
def test_a_run_that_was_removed_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [write_run(tmp_path / name) for name in ("removed", "sound")]
    with start_viewer(*folders, cache=tmp_path / "cache") as viewer, viewer.client() as client:
        assert len(get(client, "runs")) == 2
        shutil.rmtree(folders[0])
        removed, sound = get(client, "runs")
        assert "does not exist" in removed["bad_files"][0]["message"]
        assert sound["bad_files"] == []
        wait_for(lambda: get(client, "runs/removed")["summary"]["rollouts"] == 0)
        write_run(folders[0])
        wait_for(lambda: get(client, "runs/removed")["summary"]["rollouts"] == len(REWARDS))
