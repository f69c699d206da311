"""Test the template: a new project installs from a wheel, passes its tests and linters, and plays."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import gymsdk
from gymsdk import Model, UsageError, play
from gymsdk.cli import main
from gymsdk.cli.new import NAME_PATTERN, parse_name

pytestmark = pytest.mark.timeout(300)
"""Longer than the time limit of the child processes, so that a slow machine reports a failure with its output."""

TEMPLATE = Path(__file__).resolve().parent.parent / "cookiecutter-env"


@dataclass(frozen=True)
class Project:
    """A generated project: its folder, and the folder its wheel is unpacked in."""

    name: str
    folder: Path
    site: Path

    def run(self, *words: str) -> str:
        """Run Python in the folder with the installed wheel; it must succeed. Return its output."""
        # -P: import the package from the wheel, not from the folder.
        given = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        ended = subprocess.run(
            [sys.executable, "-P", *words],
            cwd=self.folder,
            env=given | {"PYTHONPATH": str(self.site)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert ended.returncode == 0, f"{words}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


Make = Callable[..., Project]


def create(name: str, folder: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["new", name, "--output", str(folder), *options])
    assert not ended.value.code


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that creates a new environment and installs it from a wheel built with hatchling only."""

    def made(name: str, *, kind: str = "single-turn", judge: bool = False) -> Project:
        create(name, tmp_path / "a folder", "--kind", kind, "--judge" if judge else "--no-judge")
        folder, site = tmp_path / "a folder" / f"gym-env-{name}", tmp_path / "site"
        built = next(WheelBuilder(str(folder)).build(directory=str(tmp_path / "dist"), versions=["standard"]))
        with zipfile.ZipFile(built) as archive:
            archive.extractall(site)
        return Project(name, folder, site)

    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Project], None]]:
    """Return a function that makes a project importable in this process."""
    before = set(sys.modules)
    yield lambda project: monkeypatch.syspath_prepend(project.site)
    for module in set(sys.modules) - before:
        if module.startswith("gym_env_"):
            del sys.modules[module]


PYTEST = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error")
KINDS = ["single-turn", "tools"]
QUICK = [("single-turn", True), ("tools", False)]
COMBINATIONS = [
    pytest.param(kind, judge, marks=() if (kind, judge) in QUICK else pytest.mark.slow, id=f"{kind}-{judge}")
    for kind in KINDS
    for judge in (False, True)
]


@pytest.mark.parametrize(("kind", "judge"), COMBINATIONS)
def test_a_new_environment_passes_its_tests_checks_and_linters_and_its_oracle_gets_the_full_reward(
    make: Make, kind: str, judge: bool
) -> None:
    project = make("maze", kind=kind, judge=judge)
    assert " passed" in project.run("-m", "pytest", "-q", *PYTEST)
    report = json.loads(project.run("-m", "gymsdk", "check", "maze", "--json"))
    assert len(report["results"]) > 20
    assert {result["status"] for result in report["results"]} <= {"passed", "skipped"}
    for split in ("train", "validation"):
        options = ("--split", split, "--model", "scripted/oracle", "--output", split)
        project.run("-m", "gymsdk", "rollout", "maze", *options)
        (figures,) = json.loads((project.folder / split / "metrics.json").read_text())
        assert set(figures["outcomes"]) == {"scored"}
        assert figures["agent_metrics"]["mean/reward"] == 1.0
    project.run("-m", "ruff", "format", "--check", "--no-cache", ".")
    project.run("-m", "ruff", "check", "--no-cache", "--extend-select", "I,B,UP,RUF,SIM,PT,ARG001,E501", ".")


@pytest.mark.slow
@pytest.mark.parametrize("judge", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_strict_type_checks(make: Make, kind: str, judge: bool) -> None:
    make("maze", kind=kind, judge=judge).run("-m", "mypy")


@pytest.mark.parametrize("kind", KINDS)
def test_gymnasium_can_make_it(make: Make, kind: str) -> None:
    code = "import gymsdk, gymnasium; env = gymnasium.make('nemo/maze'); env.reset(seed=1); print(env.step('x')[1:4])"
    assert make("maze", kind=kind).run("-c", code) == "(0.0, True, False)\n"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_list_of_all_answers_gets_no_reward(
    make: Make, here: Callable[[Project], None], policy: Callable[..., Model], kind: str
) -> None:
    here(make("maze", kind=kind))
    environment = gymsdk.load("maze")
    tasks = list(environment.tasks("train"))
    answers = ", ".join(str(task.row().get("answer", task.row().get("wanted"))) for task in tasks)
    for reply in (answers, " ".join(map(str, range(2000)))):
        rollout = await play(environment, policy(reply), tasks[0])
        assert (rollout.outcome, rollout.reward) == ("scored", 0.0), reply[:40]


def test_names_of_every_shape_install_side_by_side_and_load(make: Make, here: Callable[[Project], None]) -> None:
    shapes = ["2048", "CamelCase", "class", "a.b", "a--c", "math_v2", "x" * 64]
    for name in shapes:
        here(make(name))
    assert {gymsdk.load(name).splits for name in shapes} == {("train", "validation")}


def test_the_name_check_of_the_template_equals_that_of_the_command() -> None:
    assert f'NAME = r"{NAME_PATTERN}"\n' in (TEMPLATE / "hooks" / "pre_gen_project.py").read_text()


def run_cookiecutter(folder: Path, *words: str, answers: str = "") -> subprocess.CompletedProcess[str]:
    """Run cookiecutter itself, like a user."""
    return subprocess.run(
        [sys.executable, "-m", "cookiecutter", str(TEMPLATE), "--output-dir", str(folder), *words],
        env=os.environ | {"HOME": str(folder.parent)},
        input=answers,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_cookiecutter_asks_for_name_kind_judge_author_and_license(tmp_path: Path) -> None:
    ended = run_cookiecutter(tmp_path / "there", answers="maze\n2\ny\nAda\n2\n")
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "there" / "gym-env-maze"
    assert (folder / "gym_env_maze" / "judge.py").is_file()
    assert "class Shelf(State)" in (folder / "gym_env_maze" / "__init__.py").read_text()
    assert "Ada" in (folder / "LICENSE").read_text()


def test_cookiecutter_writes_the_same_files_as_the_command(tmp_path: Path) -> None:
    assert run_cookiecutter(tmp_path / "one", "--no-input", "name=maze").returncode == 0
    create("maze", tmp_path / "other")
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["math-v2", "a/b", "", "o'\"{}"])
def test_cookiecutter_rejects_an_invalid_name_with_an_error_message(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        parse_name(name)
    ended = run_cookiecutter(tmp_path / "there", "--no-input", f"name={name}")
    assert ended.returncode != 0
    assert "is not a valid environment name; use 1 to 64 letters" in ended.stderr
    assert list((tmp_path / "there").iterdir()) == []


def test_the_license_names_the_author_of_the_project() -> None:
    own = (TEMPLATE.parent / "LICENSE").read_text()
    assert (TEMPLATE / "templates" / "licenses" / "Apache-2.0").read_text() == own


@pytest.mark.slow
def test_pip_installs_the_built_wheel(make: Make, tmp_path: Path) -> None:
    project = make("maze")
    project.run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "built"))
    (wheel,) = (tmp_path / "built").iterdir()
    project.run("-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path / "target"), str(wheel))
    listed = Project("maze", project.folder, tmp_path / "target").run("-m", "gymsdk", "list", "--load")
    assert "maze" in listed
    assert "broken" not in listed


def test_the_first_environment_takes_less_than_25_lines() -> None:
    page = (TEMPLATE.parent / "docs" / "first-environment.md").read_text()
    written = re.findall(r"^```\w+ title=\S+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(written) == 4
    assert 15 < sum(1 for block in written for line in block.splitlines() if line.strip()) < 25
