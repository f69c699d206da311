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

VALID = {
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
INVALID = {
    "math-v2": "leave out `-v<digits>`",
    "gym-env-maze": "`gymsdk new maze`",
    "Gym-Env-": "`gymsdk new NAME`",
    **dict.fromkeys(("", "a b", "a/b", "../up", ".hidden", "end-", "a\nb", "{{ a }}"), "1 to 64 letters"),
    **dict.fromkeys(("na\u00efve", "\u8ff7\u5bab", "\udcff", "x" * 65), "1 to 64 letters"),
    **{name: f"'{name.lower().replace('-', '_')}' is already installed (" for name in ("sums", "Sums", "tool-call")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALID)
def test_a_valid_name_gives_the_distribution_the_module_and_the_entry_point(
    gymsdk: Command, workdir: Path, name: str
) -> None:
    assert gymsdk("new", name).code == 0
    folder = workdir / f"gym-env-{name}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"gym-env-{name}"
    assert project["entry-points"]["gymsdk.environments"] == {name: VALID[name]}
    compile((folder / VALID[name] / "__init__.py").read_text(), name, "exec")
    assert VALID[name].isidentifier()
    assert not keyword.iskeyword(VALID[name])


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_name_is_rejected_in_a_sentence(gymsdk: Command, workdir: Path, name: str) -> None:
    result = gymsdk("new", name)
    assert (result.code, INVALID[name] in result.err, result.err.count("\n")) == (2, True, 1)
    assert list(workdir.iterdir()) == []


def test_an_author_that_is_not_one_line_of_text_is_rejected(gymsdk: Command, workdir: Path) -> None:
    for author in ("", " ", "two\nlines", "{{ 1 }}", "\udcff", "nul\0"):
        result = gymsdk("new", "maze", "--author", author)
        assert (result.code, "write a name on one line" in result.err) == (2, True), author
    assert list(workdir.iterdir()) == []


@given(st.from_regex(NAME_PATTERN, fullmatch=True))
def test_a_valid_name_is_accepted_by_the_registry_and_by_gymnasium(name: str) -> None:
    assert registry._NAME_PATTERN.fullmatch(name)
    assert not registry._VERSIONED_NAME_PATTERN.fullmatch(name)
    assert parse_env_id(f"nemo/{name}") == ("nemo", name, None)
    assert parse_name(name).module.isidentifier()


def test_an_existing_folder_is_not_changed_and_a_link_is_not_followed(gymsdk: Command, workdir: Path) -> None:
    (workdir / "gym-env-maze").mkdir()
    (workdir / "gym-env-link").symlink_to(workdir / "nowhere")
    (workdir / "file").touch()
    for arguments, message in (
        (("maze",), "Error: gym-env-maze already exists; choose another name"),
        (("link",), "Error: gym-env-link already exists; choose another name"),
        (("other", "--output", "file"), "choose another folder with --output"),
    ):
        result = gymsdk("new", *arguments)
        assert (result.code, result.out, message in result.err) == (2, "", True)
    assert list((workdir / "gym-env-maze").iterdir()) == []
    assert not (workdir / "nowhere").exists()


@pytest.mark.parametrize("author", ['Ada "L" \\ Love', "\u0141ucja \U0001f600", "O'Hara, \u8ff7\u5bab"])
def test_the_author_is_written_unchanged(gymsdk: Command, workdir: Path, author: str) -> None:
    assert gymsdk("new", "maze", "--author", author, "--license", "MIT").code == 0
    folder = workdir / "gym-env-maze"
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
def test_each_licence_has_its_text(gymsdk: Command, workdir: Path, license: str, spdx: str, opening: str) -> None:
    gymsdk("new", "maze", "--license", license)
    project = tomllib.loads((workdir / "gym-env-maze" / "pyproject.toml").read_text())["project"]
    assert project["license"] == spdx
    assert opening in (workdir / "gym-env-maze" / "LICENSE").read_text()
    assert ("Private :: Do Not Upload" in project["classifiers"]) is (license == "proprietary")


def test_new_prints_the_next_commands(gymsdk: Command, workdir: Path) -> None:
    output = gymsdk("new", "maze", "--output", "new folder").out
    assert "pip install -e './new folder/gym-env-maze[dev]'" in output
    assert "gymsdk check maze" in output
    assert (workdir / "new folder" / "gym-env-maze" / "gym_env_maze" / "__init__.py").is_file()


def test_json_output_lists_the_written_files(gymsdk: Command, workdir: Path) -> None:
    output = json.loads(gymsdk("new", "maze", "--judge", "--json").out)
    assert (output["distribution"], output["module"]) == ("gym-env-maze", "gym_env_maze")
    assert "gym_env_maze/judge.py" in output["files"]
    assert all((workdir / output["folder"] / file).is_file() for file in output["files"])


@pytest.mark.slow
def test_the_home_folder_is_neither_read_nor_written(start: Start, workdir: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cookiecutterrc").write_text("default_context: {kind: nonsense}")
    out, err = start("new", "maze", env=os.environ | {"HOME": str(home)}).communicate(timeout=60)
    assert (out.startswith("Wrote gym-env-maze"), err) == (True, "")
    assert [path.name for path in home.iterdir()] == [".cookiecutterrc"]


@pytest.mark.slow
def test_without_cookiecutter_new_says_what_to_install(workdir: Path) -> None:
    code = "import sys; sys.modules['cookiecutter'] = None; from gymsdk.cli import main; main(['new', 'maze'])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=workdir, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 2
    assert 'pip install "gymsdk[author]"' in result.stderr
    assert list(workdir.iterdir()) == []
