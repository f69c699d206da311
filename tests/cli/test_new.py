from __future__ import annotations

import json
import keyword
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from gymnasium.envs.registration import parse_env_id
from hypothesis import given
from hypothesis import strategies as st

from cli.conftest import Command, Start
from gymsdk.cli.new import NAME_PATTERN, parse_name
from gymsdk.plugins import registry

RIGHT = {
    "my-env": "gym_env_my_env",
    "2048": "gym_env_2048",
    "CamelCase": "gym_env_camelcase",
    "class": "gym_env_class",
    "math_v2": "gym_env_math_v2",
    "v2": "gym_env_v2",
    "a.b": "gym_env_a_b",
    "a--b": "gym_env_a__b",
    "x" * 64: "gym_env_" + "x" * 64,
}
WRONG = {
    "math-v2": "leave out `-v<digits>`",
    "gym-env-maze": "`gymsdk new maze`",
    "Gym-Env-": "`gymsdk new NAME`",
    "": "1 to 64 letters",
    "a b": "1 to 64 letters",
    "a/b": "1 to 64 letters",
    "../up": "1 to 64 letters",
    ".hidden": "1 to 64 letters",
    "end-": "1 to 64 letters",
    "na\u00efve": "1 to 64 letters",
    "\u8ff7\u5bab": "1 to 64 letters",
    "a\nb": "1 to 64 letters",
    "{{ a }}": "1 to 64 letters",
    "\udcff": "1 to 64 letters",
    "x" * 65: "1 to 64 letters",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_name_names_the_distribution_the_module_and_the_entry_point(
    gymsdk: Command, there: Path, name: str
) -> None:
    assert gymsdk("new", name).code == 0
    folder = there / f"gym-env-{name}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"gym-env-{name}"
    assert project["entry-points"]["gymsdk.environments"] == {name: RIGHT[name]}
    compile((folder / RIGHT[name] / "__init__.py").read_text(), name, "exec")
    assert RIGHT[name].isidentifier()
    assert not keyword.iskeyword(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_refused_in_a_sentence(gymsdk: Command, there: Path, name: str) -> None:
    ended = gymsdk("new", name)
    assert ended.code == 2
    assert WRONG[name] in ended.err
    assert ended.err.count("\n") == 1
    assert list(there.iterdir()) == []


@given(st.from_regex(NAME_PATTERN, fullmatch=True))
def test_a_right_name_is_the_registrys_and_gymnasiums_too(name: str) -> None:
    assert registry._NAME_PATTERN.fullmatch(name)
    assert not registry._VERSIONED_NAME_PATTERN.fullmatch(name)
    assert parse_env_id(f"nemo/{name}") == ("nemo", name, None)
    assert parse_name(name).module.isidentifier()


def test_an_existing_folder_is_left_alone(gymsdk: Command, there: Path) -> None:
    (there / "gym-env-maze").mkdir()
    ended = gymsdk("new", "maze")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: gym-env-maze already exists; choose another name")
    assert list((there / "gym-env-maze").iterdir()) == []


def test_a_broken_link_is_left_alone(gymsdk: Command, there: Path) -> None:
    (there / "gym-env-maze").symlink_to(there / "nowhere")
    assert gymsdk("new", "maze").code == 2
    assert not (there / "nowhere").exists()


@pytest.mark.parametrize("name", ["sums", "Sums"])
def test_the_name_of_an_installed_environment_is_refused(gymsdk: Command, there: Path, name: str) -> None:
    ended = gymsdk("new", name)
    assert ended.code == 2
    assert "an environment named 'sums' is already installed (env_sums 1.0); choose another name" in ended.err
    assert list(there.iterdir()) == []


def test_a_name_whose_distribution_is_installed_is_refused(gymsdk: Command) -> None:
    assert "'tool_call' is already installed" in gymsdk("new", "tool-call").err


@pytest.mark.parametrize("author", ["", " ", "two\nlines", "{{ 1 }}", "\udcff", "nul\0"])
def test_an_author_that_is_no_line_of_text_is_refused(gymsdk: Command, there: Path, author: str) -> None:
    ended = gymsdk("new", "maze", "--author", author)
    assert ended.code == 2
    assert "write a name on one line" in ended.err
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("author", ['Ada "L" \\ Love', "\u0141ucja \U0001f600", "O'Hara, \u8ff7\u5bab"])
def test_an_author_stands_as_written(gymsdk: Command, there: Path, author: str) -> None:
    assert gymsdk("new", "maze", "--author", author, "--license", "MIT").code == 0
    folder = there / "gym-env-maze"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": author}]
    assert author in (folder / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("license", "spdx", "opening"),
    [
        ("Apache-2.0", "Apache-2.0", "Apache License"),
        ("MIT", "MIT", "MIT License"),
        ("proprietary", "LicenseRef-Proprietary", "All rights reserved"),
    ],
)
def test_each_licence_comes_with_its_text(gymsdk: Command, there: Path, license: str, spdx: str, opening: str) -> None:
    gymsdk("new", "maze", "--license", license)
    project = tomllib.loads((there / "gym-env-maze" / "pyproject.toml").read_text())["project"]
    assert project["license"] == spdx
    assert opening in (there / "gym-env-maze" / "LICENSE").read_text()
    assert ("Private :: Do Not Upload" in project["classifiers"]) is (license == "proprietary")


def test_new_prints_the_next_commands(gymsdk: Command, there: Path) -> None:
    told = gymsdk("new", "maze", "--output", "new folder").out
    assert "pip install -e './new folder/gym-env-maze[dev]'" in told
    assert "gymsdk check maze" in told
    assert (there / "new folder" / "gym-env-maze" / "gym_env_maze" / "__init__.py").is_file()


def test_programs_get_json(gymsdk: Command, there: Path) -> None:
    told = json.loads(gymsdk("new", "maze", "--judge", "--json").out)
    assert (told["distribution"], told["module"]) == ("gym-env-maze", "gym_env_maze")
    assert "gym_env_maze/judge.py" in told["files"]
    assert all((there / told["folder"] / file).is_file() for file in told["files"])


def test_an_output_that_is_no_folder_is_refused(gymsdk: Command, there: Path) -> None:
    (there / "file").write_text("")
    ended = gymsdk("new", "maze", "--output", "file")
    assert ended.code == 2
    assert "choose another folder with --output" in ended.err


def test_nothing_is_read_from_or_left_in_the_home_folder(start: Start, there: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cookiecutterrc").write_text("default_context: {kind: nonsense}")
    out, err = start("new", "maze", env=os.environ | {"HOME": str(home)}).communicate(timeout=60)
    assert (out.startswith("Wrote gym-env-maze"), err) == (True, "")
    assert [path.name for path in home.iterdir()] == [".cookiecutterrc"]


def test_without_cookiecutter_new_says_what_to_install(there: Path) -> None:
    code = "import sys; sys.modules['cookiecutter'] = None; from gymsdk.cli import main; main(['new', 'maze'])"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=there, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert 'pip install "gymsdk[author]"' in ended.stderr
    assert list(there.iterdir()) == []


def test_its_help_fits_a_terminal(gymsdk: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, gymsdk("new", "--help").out.splitlines())) <= 80
