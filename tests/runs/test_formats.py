"""Lines in the format of a later version are refused with the version to install, and lines without one are read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gymsdk import client
from gymsdk.errors import BadRow, Failed
from gymsdk.jsonl import dump_row, read_rows
from gymsdk.line import FORMAT, StoredRollout, read, strip_results
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.remote import parse_rollout
from gymsdk.runs import read as read_run

from .conftest import RIGHT, run_command

NEWER = {"format": FORMAT + 1, "version": "99.1.2"}


@pytest.fixture
def newer(original: Path, tmp_path: Path) -> Path:
    """Return a run of four lines, the second of which a later version wrote."""
    folder = shutil.copytree(original, tmp_path / "newer")
    lines = [line for _, line in read_rows(folder / "rollouts.jsonl")][:4]
    lines[1]["gymsdk"] |= NEWER
    (folder / "rollouts.jsonl").write_bytes(b"".join(map(dump_row, lines)))
    return folder


def build_line(**host_fields: Any) -> dict[str, Any]:
    params = {"input": "2 + 2"}
    response = {"id": "r", "object": "response", "output": []}
    known = {"environment": "sums", "outcome": "scored", "verdict": []}
    return {"responses_create_params": params, "response": response, "reward": 1.0, "gymsdk": known | host_fields}


def test_a_run_writes_the_format_and_the_version(original: Path) -> None:
    host_fields = [line["gymsdk"] for _, line in read_rows(original / "rollouts.jsonl")]
    assert {(fields["format"], fields["version"]) for fields in host_fields} == {(FORMAT, version("gymsdk"))}


@pytest.mark.parametrize("given", [{}, {"format": FORMAT}, {"format": 0}, {"format": None}, {"format": "2"}])
def test_lines_of_this_format_and_of_earlier_and_other_programs_are_read(given: dict[str, Any]) -> None:
    assert StoredRollout(build_line(**given)).reward == 1.0


def test_the_error_names_the_version_to_install() -> None:
    later = "a later version of gymsdk wrote it in format 7"
    for given, named in (
        (NEWER, ("gymsdk 99.1.2 wrote it in format 2", "pip install -U 'gymsdk>=99.1.2'", version("gymsdk"))),
        ({"format": 7, "version": 3}, (later, "pip install -U 'gymsdk'")),
    ):
        with pytest.raises(BadRow, match=r"^rollouts\.jsonl:2: ") as error:
            StoredRollout(build_line(**given), where="rollouts.jsonl:2")
        assert [text for text in named if text not in str(error.value)] == []


def test_an_answer_in_a_newer_format_is_a_bad_answer_and_no_row_to_play() -> None:
    answer, job = build_line(**NEWER), Job("sums", 0, 0, {"responses_create_params": {"input": "2 + 2"}})
    with pytest.raises(Failed, match=r"gymsdk>=99\.1\.2") as error:
        client.parse_verdict(answer, job.row)
    assert error.value.kind == "bad_answer"
    with pytest.raises(Failed, match=r"gymsdk>=99\.1\.2") as error:
        parse_rollout(answer, job, 0, milliseconds=1.0)
    assert error.value.kind == "bad_answer"
    with pytest.raises(BadRow, match=r"gymsdk>=99\.1\.2"):
        strip_results(build_line(**NEWER))


def test_the_index_names_the_line_and_has_the_others(newer: Path) -> None:
    with read_run(newer) as run:
        assert [row["task"] for row in run.list_rows()] == [0, 2, 3]
        [bad] = run.queries.list_bad_lines()
    assert (bad["count"], bad["lines"]) == (1, [2])
    assert "install the other version" in bad["message"]
    with pytest.raises(BadRow, match=r"rollouts\.jsonl:2: gymsdk 99"):
        list(read(newer / "rollouts.jsonl"))


@pytest.mark.slow
def test_the_version_that_reads_the_line_indexes_it_again(newer: Path) -> None:
    with read_run(newer) as run:
        assert len(run.list_rows()) == 3
    code = (
        "import gymsdk.line as line; line.FORMAT += 1; from gymsdk.runs import read; print(len(read({!r}).list_rows()))"
    )
    command = [sys.executable, "-c", code.format(str(newer))]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip() == "4"


@pytest.mark.slow
def test_commands_refuse_the_run_and_change_nothing_but_show_lists_the_other_rollouts(newer: Path) -> None:
    before = {path: path.read_bytes() for path in newer.iterdir()}
    for arguments in (
        ("reverify", newer),
        ("export", newer, "--sft", newer / "s.jsonl"),
        ("rollout", *RIGHT, "--output", newer, "--resume"),
    ):
        done = run_command(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert "pip install -U 'gymsdk>=99.1.2'" in done.stderr
        assert {path: path.read_bytes() for path in newer.iterdir()} == before
    shown = run_command("show", newer, "--json")
    assert (shown.returncode, len(json.loads(shown.stdout)["rollouts"])) == (0, 3), shown.stderr
    assert "gymsdk>=99.1.2" in shown.stderr
