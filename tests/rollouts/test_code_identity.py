"""The identity of code: imported files, distributions and variables; and lines that do not belong to a run."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sums_environment import PLAIN

from gymsdk import Environment
from gymsdk.errors import BadOutput, BrokenEnvironment
from gymsdk.graders.maths import GRADER
from gymsdk.rollouts.fingerprint import ADDED_PARTS, digest_distributions, digest_imports, read_variable_names
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.plan import Plan, build_settings, list_code_differences, list_differences

USES_HELPER = f"""{PLAIN}
IMPORT

environ = ["GRADER_MODE", "GRADER_SECRET"]

@hookimpl
def verify():
    LATE
    return Verdict(reward=VALUE)
"""


def build_source(top: str, value: str = "helper_grade.grade()", late: str = "pass") -> str:
    return USES_HELPER.replace("IMPORT", top).replace("VALUE", value).replace("LATE", late)


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with modules that an environment uses; their modules are removed afterwards."""
    folder = tmp_path / "helpers"
    (folder / "helper_package").mkdir(parents=True)
    (folder / "helper_namespace").mkdir()
    (folder / "helper_grade.py").write_text("from helper_deep import SCORE\n\ndef grade():\n    return SCORE\n")
    (folder / "helper_deep.py").write_text("SCORE = 1.0\n")
    (folder / "helper_package" / "__init__.py").write_text("from .grading import grade\n")
    (folder / "helper_package" / "grading.py").write_text("def grade():\n    return 1.0\n")
    (folder / "helper_namespace" / "grading.py").write_text("def grade():\n    return 1.0\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)) or name == "helper_namespace":
            del sys.modules[name]


def load(name: str = "sums") -> Environment:
    module = importlib.import_module(f"env_{name}")
    return Environment(name, module, version="1.0")


def build(name: str = "sums", *, stored: dict[str, Any] | None = None) -> dict[str, Any]:
    plan = Plan(environments={name: {}}, model="scripted/oracle")
    written: dict[str, Any] = json.loads(json.dumps(build_settings(plan, {name: load(name)}, stored=stored)))
    return written


CASES = {
    "a statement": (build_source("import helper_grade"), "helper_grade.py", "helper_grade"),
    "a module that a module imports": (build_source("import helper_grade"), "helper_deep.py", "helper_deep"),
    "names": (build_source("from helper_deep import SCORE", "SCORE"), "helper_deep.py", "helper_deep"),
    "a package": (
        build_source("import helper_package", "helper_package.grade()"),
        "helper_package/grading.py",
        "helper_package.grading",
    ),
    "a namespace package": (
        build_source("import helper_namespace.grading as late", "late.grade()"),
        "helper_namespace/grading.py",
        "helper_namespace.grading",
    ),
    "a hook, when it runs": (
        build_source("", late="import helper_grade"),
        "helper_grade.py",
        "helper_grade",
    ),
    "a call with a name": (
        build_source("", "late.grade()", "import importlib; late = importlib.import_module('helper_grade')"),
        "helper_grade.py",
        "helper_grade",
    ),
    "a call with a computed name": (
        build_source("import importlib\nlate = importlib.import_module('_'.join(['helper', 'grade']))", "late.grade()"),
        "helper_deep.py",
        "helper_deep",
    ),
    "a path": (
        build_source(
            "from importlib.util import spec_from_file_location, module_from_spec\n"
            "spec = spec_from_file_location('by_path', __file__.replace('site/env_sums', 'helpers/helper_deep'))\n"
            "late = module_from_spec(spec)\nspec.loader.exec_module(late)",
            "late.SCORE",
        ),
        "helper_deep.py",
        "by_path",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_changed_file_that_the_environment_imports_is_a_difference(
    installed: Callable[..., Path], helpers: Path, case: str
) -> None:
    source, file, module = CASES[case]
    installed(source=source)
    before = build()
    assert list_differences(before, build(stored=before)) == []
    with (helpers / file).open("a") as changed:
        changed.write("# changed\n")
    expected = [f"module {module!r}, which environment 'sums' imports, has changed"]
    assert list_differences(before, build(stored=before)) == expected
    assert list_code_differences(before, build(stored=before)) == expected


def test_a_module_beside_the_entry_point_of_a_package_counts(tmp_path: Path, helpers: Path) -> None:
    package = tmp_path / "site-packages" / "helper_env"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text("from . import grading\n")
    (package / "grading.py").write_text("def grade():\n    return 1.0\n")
    sys.path.insert(0, str(package.parent))
    try:
        plugin = importlib.import_module("helper_env.plugin")
    finally:
        sys.path.remove(str(package.parent))
    assert "helper_env.grading" in digest_imports(plugin)


def test_imports_of_other_code_in_the_process_are_no_difference(installed: Callable[..., Path], helpers: Path) -> None:
    (helpers / "helper_package" / "viewing.py").touch()
    (helpers / "helper_late.py").write_text(
        "import importlib\nimplementation = importlib.import_module('helper_' + 'deep')"
    )
    installed(source=build_source("import helper_package", "1.0", late="import helper_late"))
    before = build()
    for name in ("helper_package.viewing", "helper_late"):
        importlib.import_module(name)
    assert list_differences(before, build(stored=before)) == []


def test_files_of_the_standard_library_of_site_packages_and_of_gymsdk_other_than_graders_are_left_out() -> None:
    import gym_env_math

    assert digest_imports(gym_env_math) == {"gymsdk.graders.maths": GRADER}


def test_variables_are_compared_by_a_keyed_hash(
    installed: Callable[..., Path], helpers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(source=build_source("import helper_grade"))
    monkeypatch.setenv("GRADER_MODE", "lenient-value")
    before = build()
    assert "lenient-value" not in json.dumps(before)
    assert before["environments"]["sums"]["environ"]["GRADER_SECRET"] is None
    other_run = build()
    names = ("GRADER_MODE", "GRADER_SECRET")
    assert before["environments"]["sums"]["environ"] != other_run["environments"]["sums"]["environ"]
    assert list_differences(before, build(stored=before)) == []
    for name, value in zip(names, ("strict", ""), strict=True):
        monkeypatch.setenv(name, value)
    assert list_differences(before, build(stored=before)) == [
        "the variable GRADER_MODE of environment 'sums' has changed",
        "the variable GRADER_SECRET of environment 'sums' was not set, now there",
    ]
    monkeypatch.delenv("GRADER_MODE")
    assert "the variable GRADER_MODE of environment 'sums' was there, now not set" in list_differences(
        before, build(stored=before)
    )


def test_an_environ_that_is_no_list_is_refused_and_that_of_os_is_not_a_list(made: Callable[..., Any]) -> None:
    assert read_variable_names("made", made("from os import environ")) == []
    assert read_variable_names("made", made("environ = ('B', 'A')")) == ["A", "B"]
    for wrong in ("'GRADER_MODE'", "[1]", "{'A': 1}", "['']"):
        with pytest.raises(BrokenEnvironment, match="`environ` must be a list of names of variables"):
            read_variable_names("made", made(f"environ = {wrong}"))


def test_a_requirement_is_compared_by_its_version_and_its_files(installed: Callable[..., Path], helpers: Path) -> None:
    site = installed(source=build_source("import helper_grade"))
    about = site / "grader-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: grader\nVersion: 1.0\n")
    record = "grader.py,sha256=a,9\ngrader-1.0.dist-info/RECORD,,\n"
    (about / "RECORD").write_text(record)
    with (site / "env_sums-1.0.dist-info" / "METADATA").open("a") as file:
        file.write("Requires-Dist: grader>=1; python_version > '3'\nRequires-Dist: missing\n")
        file.write("Requires-Dist: pytest>=8; extra == 'dev'\n")
    before = build()
    assert before["environments"]["sums"]["distributions"].keys() == {"env_sums", "grader"}
    again = (
        "../../../bin/grader,x,1\n__pycache__/grader.pyc,,\n_editable_impl_grader.pth,x,1\n__editable___grader.py,x,1\n"
    )
    again += "".join(f"grader-1.0.dist-info/{name},x,1\n" for name in ("INSTALLER", "METADATA", "WHEEL", "licenses/A"))
    (about / "RECORD").write_text(again + record)
    assert list_differences(before, build(stored=before)) == []
    (about / "RECORD").write_text(f"{record}grader-1.0.dist-info/entry_points.txt,x,1\n")
    assert list_differences(before, build(stored=before)) == ["distribution 'grader' of environment 'sums' has changed"]
    (about / "RECORD").write_text(record.replace("=a", "=b"))
    assert list_differences(before, build(stored=before)) == ["distribution 'grader' of environment 'sums' has changed"]
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: grader\nVersion: 1.1\n")
    assert list_differences(before, build(stored=before)) == [
        "distribution 'grader' of environment 'sums' was 1.0, now 1.1"
    ]


def test_the_installed_environments_have_the_digests_of_their_distributions() -> None:
    found = digest_distributions("math")
    assert {"gym-env-math", "gymsdk"} <= found.keys()


def test_a_run_of_an_earlier_version_is_compared_as_before(installed: Callable[..., Path], helpers: Path) -> None:
    installed(source=build_source("import helper_grade"))
    before = build()
    del before["environ_key"]
    for part in ADDED_PARTS:
        del before["environments"]["sums"][part]
    (helpers / "helper_grade.py").write_text("def grade():\n    return 8.0\n")
    assert list_differences(before, build(stored=before)) == []
    (helpers.parent / "site" / "env_sums.py").write_text(build_source("import helper_grade") + "# changed\n")
    assert list_differences(before, build(stored=before)) == ["the code of environment 'sums' has changed"]


ROW = '{"responses_create_params": {"input": "x"}, "_ng_task_index": %s, "_ng_rollout_index": %s}\n'
LINE = '{"_ng_task_index": %s, "_ng_rollout_index": %s, "reward": 1.0}\n'
TWICE = "repeats task 1, repeat 0, which an earlier line holds"
STRANGE = "belongs to no task of the run"


def write_run(path: Path, *, rollouts: str, failures: str = "", complete: bool = True) -> RunFolder:
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"settings": {}, "resumed": [], "inputs_complete": complete}))
    (path / "inputs.jsonl").write_text("".join(ROW % (task, repeat) for task in range(3) for repeat in range(2)))
    (path / "rollouts.jsonl").write_text(rollouts)
    (path / "failures.jsonl").write_text(failures)
    return RunFolder(path)


@pytest.mark.parametrize(
    ("rollouts", "failures", "problem"),
    [
        (LINE % (1, 0) + LINE % (0, 0) + "\n" + LINE % (1, 0), "", f"rollouts.jsonl:4: the line {TWICE}"),
        (LINE % (1, 0), LINE % (2, 0) + LINE % (1, 0), f"failures.jsonl:2: the line {TWICE}"),
        ("", LINE % (1, 0) * 2, f"failures.jsonl:2: the line {TWICE}"),
        (LINE % (0, 0) + LINE % (3, 0), "", f"rollouts.jsonl:2: the line {STRANGE}"),
        (LINE % (0, 2), "", f"rollouts.jsonl:1: the line {STRANGE}"),
        (LINE % (-1, 0), "", f"rollouts.jsonl:1: the line {STRANGE}"),
        (LINE % ("true", 0), "", f"rollouts.jsonl:1: the line {STRANGE}"),
        (LINE % ("1.0", 0), "", f"rollouts.jsonl:1: the line {STRANGE}"),
        (LINE % ('"1"', 0), "", f"rollouts.jsonl:1: the line {STRANGE}"),
        ('{"reward": 1.0}\n', "", f"rollouts.jsonl:1: the line {STRANGE}"),
        ("", LINE % (9, 0), f"failures.jsonl:1: the line {STRANGE}"),
    ],
)
def test_a_line_that_is_there_twice_or_belongs_to_no_task_is_refused(
    tmp_path: Path, rollouts: str, failures: str, problem: str
) -> None:
    with pytest.raises(BadOutput) as caught:
        write_run(tmp_path / "run", rollouts=rollouts, failures=failures).check_lines()
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "line", ['{"a": 1}', ROW.strip() % ('"1"', 0), ROW.strip() % (1, "null"), ROW.strip() % ("[]", 0)]
)
def test_an_input_without_a_task_is_refused(tmp_path: Path, line: str) -> None:
    folder = write_run(tmp_path / "run", rollouts="")
    with folder.inputs.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(BadOutput, match=rf"inputs\.jsonl:7: the line {STRANGE}"):
        folder.check_lines()


def test_an_incomplete_last_line_is_no_line(tmp_path: Path) -> None:
    line = LINE % (1, 0)
    write_run(tmp_path / "run", rollouts=line + line[:-9]).check_lines()
    write_run(tmp_path / "other", rollouts=line + line.rstrip("\n")).check_lines()


def test_a_row_that_was_sent_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rollouts=LINE % (1, 0))
    with folder.inputs.open("a") as file:
        file.write(ROW % (1, 0))
    with pytest.raises(BadOutput, match=rf"inputs\.jsonl:7: the line {TWICE}"):
        folder.check_lines()


@pytest.mark.parametrize("name", ["inputs.jsonl", "rollouts.jsonl", "failures.jsonl"])
def test_a_file_that_is_not_regular_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", rollouts="")
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(BadOutput, match=f"{name} is not a regular file"):
        folder.check_lines()


def test_rows_that_were_written_once_per_task_stand_for_every_repeat(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rollouts=LINE % (0, 0) + LINE % (0, 2))
    folder.inputs.write_text('{"_ng_task_index": 0}\n')
    folder.check_lines(repeats=3)
    with pytest.raises(BadOutput, match=r"rollouts\.jsonl:2"):
        folder.check_lines(repeats=2)
