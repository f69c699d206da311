"""Later versions read the files of earlier ones: runs, annotations, an index and token captures.

A folder in `stored/` holds the files that a version wrote (`stored/write.py`), and in `answers.json` what that version
said about them. `python tests/test_stored.py FOLDER` writes `answers.json`; run it with the version that wrote the
files. If a later version must answer differently, CHANGELOG says so under *Changed*, and the answer is written again.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored.write import OUTCOMES, install

from gymsdk import runs
from gymsdk.cli import main
from gymsdk.jsonl import read_rows
from gymsdk.runs.index import get_default_path
from gymsdk.runs.notes import RunNotes
from gymsdk.runs.source import find_run
from gymsdk.tokens.capture import TokenCaptureFolder
from gymsdk.types import Row

STORED = Path(__file__).parent / "stored"
FOLDERS = sorted(path.name for path in STORED.iterdir() if (path / "answers.json").exists())
RUNS = ("scored", "tokens", "mixed", "killed", "lines.jsonl")

COMMANDS: dict[str, list[str]] = {
    **{f"show {run}": ["show", run, "--json"] for run in RUNS},
    "show as text": ["show", "mixed"],
    "show a transcript": ["show", "scored", "0:0"],
    "show a transcript as JSON": ["show", "scored", "0:1", "--json"],
    "show a failure": ["show", "mixed", "2:0", "--json"],
    "show tokens": ["show", "tokens", "0:0", "--json"],
    "show by condition": ["show", "scored", "--where", "reward<1", "--sort", "turns", "--json"],
    "show by outcome": ["show", "mixed", "--where", "outcome=failed", "--json"],
    "show by text": ["show", "mixed", "--search", "undecided", "--json"],
    "compare": ["compare", "scored", "tokens", "--json"],
    "compare as text": ["compare", "mixed", "killed"],
    "reverify scored": ["reverify", "scored", "--json", "-o", "again.jsonl"],
    "reverify killed": ["reverify", "killed", "--json", "-o", "again.jsonl"],
    "reverify lines": ["reverify", "lines.jsonl", "--agent", "outcomes", "--json", "-o", "again.jsonl"],
    "replay scored": ["replay", "scored", "--json"],
    "replay mixed": ["replay", "mixed", "--json"],
    "export conversations": ["export", "scored", "mixed", "--sft", "sft.jsonl", "--truncated"],
    "export pairs": ["export", "scored", "mixed", "--dpo", "pairs.jsonl"],
    "view": ["view", "scored", "mixed", "lines.jsonl", "--export", "pages"],
}
"""The commands that read stored files; the test compares their output and files."""

LAST_DIGITS = re.compile(r"\b\d+\.\d{12,}\b")
CHANGING = re.compile(r"\d+(\.\d+)? ?(s|ms|MB)\b|gymsdk-\w+|\d{8}-\d{6}")
"""The parts of a command's output that differ from one execution to the next."""

LONG = 3000
"""Texts above this number of characters are stored as their digest."""


def run(*words: str) -> tuple[int, str, str]:
    """Run a command of gymsdk in this process; return its exit code and its output on both streams."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main([*words])
    out, err = (stream.detach().getvalue().decode() for stream in (output, errors))
    return int(ended.value.code or 0), out, err


def prepare(folder: Path, here: Path) -> None:
    """Copy the stored files of *folder* to *here*, with the index where the viewer expects it."""
    shutil.copytree(folder, here, dirs_exist_ok=True)
    index = get_default_path(find_run(here / "scored"))
    index.parent.mkdir(parents=True)
    (here / "index.sqlite").rename(index)


def answer(words: list[str], here: Path) -> dict[str, Any]:
    """Return the exit code, the output and the new files of a command that runs in *here*."""
    before = {path for path in here.rglob("*") if "cache" not in path.parts}
    code, output, errors = run(*words)
    new = sorted(
        path for path in here.rglob("*") if path.is_file() and path not in before and "cache" not in path.parts
    )
    files = {str(path.relative_to(here)): shorten(unpack(path.read_text())) for path in new if path.suffix != ".html"}
    for path in new:
        path.unlink()
    place = f"{here}{os.sep}"
    return {"code": code, "output": shorten(output.replace(place, "")), "errors": errors, "files": files}


def read_table(path: Path) -> list[Row]:
    """Return the rows that frames and Parquet files have for a run; later versions may add columns."""
    with runs.read(path) as stored:
        rows: list[Row] = json.loads(json.dumps(stored.list_rows()))
    return rows


def unpack(text: str) -> str:
    """Return the data of an exported page without its compression, which differs between versions of zlib."""
    packed = re.fullmatch(r'(.*= ")(H4sI[^"]*)(".*)', text.strip(), re.DOTALL)
    if packed is None:
        return text
    return packed[1] + gzip.decompress(base64.b64decode(packed[2])).decode() + packed[3]


def shorten(text: str) -> str:
    # Python 3.12 adds numbers more exactly than 3.11.
    text = LAST_DIGITS.sub(lambda number: f"{float(number[0]):.12g}", CHANGING.sub("N", text))
    return text if len(text) <= LONG else f"{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()}"


@pytest.fixture(params=FOLDERS)
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, Any]]:
    """Return a copy of the stored files, which is the working folder, and the answers of their version."""
    installed("outcomes", OUTCOMES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here" / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prepare(STORED / request.param, tmp_path / "here")
    return tmp_path / "here", json.loads((STORED / request.param / "answers.json").read_bytes())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_the_same_about_stored_files(stored: tuple[Path, dict[str, Any]], command: str) -> None:
    here, answers = stored
    assert answer(COMMANDS[command], here) == answers[command]


@pytest.mark.parametrize("run", RUNS)
def test_the_table_of_a_run_has_the_same_values(stored: tuple[Path, dict[str, Any]], run: str) -> None:
    here, answers = stored
    before = answers[f"table {run}"]
    after = [{name: row[name] for name in old} for old, row in zip(before, read_table(here / run), strict=True)]
    assert after == before


def test_a_killed_run_is_resumed(stored: tuple[Path, dict[str, Any]]) -> None:
    here, _ = stored
    before = (here / "killed" / "rollouts.jsonl").read_bytes().splitlines(keepends=True)[:-1]
    words = ["rollout", "outcomes", "--split", "train", "--repeats", "4", "--concurrency", "2", "--set", "pause=0.1"]
    words += ["--model", "scripted/oracle", "--attempts", "1", "--output", "killed", "--resume"]
    assert run(*words)[0] == 1
    after = (here / "killed" / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    assert after[: len(before)] == before
    scored, failed = (
        {(line["_ng_task_index"], line["_ng_rollout_index"]) for _, line in read_rows(here / "killed" / name)}
        for name in ("rollouts.jsonl", "failures.jsonl")
    )
    assert scored | failed == {(task, repeat) for task in range(6) for repeat in range(4)}
    assert not scored & failed
    assert len(after) == len(scored) == 12


def test_annotations_are_read_and_extended(stored: tuple[Path, dict[str, Any]]) -> None:
    here, _ = stored
    notes = RunNotes(find_run(here / "scored"))
    assert {(note.id, note.item, *note.tags) for note in notes.read()} == {("1:1", 1, "odd"), ("0:0", None, "keep")}
    notes.add({"id": "0:1", "tags": ["new"]})
    assert len(notes.read()) == 3


def test_captured_calls_are_continued(stored: tuple[Path, dict[str, Any]]) -> None:
    here, _ = stored
    calls = {
        name: [line for _, line in read_rows(here / "captures" / f"{name}.tokens.jsonl")] for name in ("whole", "lost")
    }
    capture = TokenCaptureFolder(here / "captures")
    last = calls["whole"][-1]
    lineage = capture.begin_call("whole", "next", last["gymsdk_conversation_digest"])
    assert lineage.parent is not None
    assert (lineage.status, lineage.parent.call_id) == ("resolved", last["model_call_id"])
    assert lineage.parent.tokens["prompt_token_ids"] == last["prompt_token_ids"]
    assert capture.begin_call("lost", "next", "0" * 16).status == "unresolved"
    intents = (here / "captures" / "lost.tokens.intents").read_text().split()
    assert len(intents) == len(calls["lost"]) + 2


def write_answers(folder: Path) -> None:
    """Write the answers of the installed version about the files of *folder*."""
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch).resolve() / "here"
        sys.path.insert(0, install(Path(scratch) / "site"))
        os.environ |= {"XDG_CACHE_HOME": str(here / "cache"), "COLUMNS": "120"}
        prepare(folder, here)
        os.chdir(here)
        answers: dict[str, Any] = {name: answer(words, here) for name, words in COMMANDS.items()}
        answers |= {f"table {name}": read_table(here / name) for name in RUNS}
        (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    write_answers(Path(sys.argv[1]).resolve())
