"""Test the published files: five wheels and their source distributions, complete, typed, without local paths."""

from __future__ import annotations

import compileall
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from email.message import Message
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {
    "gymsdk": Path(),
    "gym_env_math": Path("environments/math"),
    "gym_env_multineedle": Path("environments/multineedle"),
    "gym_env_tool_call": Path("environments/tool_call"),
    "gymsdk_nemo_compat": Path("compat"),
}
STARTUP = {"gymsdk": {"gymsdk_startup.py", "gymsdk_startup.pth"}}
"""The files next to the package in each wheel."""

FURTHER = {"gymsdk_nemo_compat": "nemo_gym"}
"""The second package of a wheel."""

BESIDE = [package for package in PROJECTS if package != "gymsdk"]
ENVIRONMENTS = [package for package in BESIDE if package.startswith("gym_env_")]
SOURCES = [
    "gymsdk",
    "startup",
    "cookiecutter-env",
    "environments",
    "compat",
    "docs",
    "hatch_build.py",
    "pyproject.toml",
]
PAGES = ["README.md", "CHANGELOG.md", "LICENSE", ".gitignore"]
PASSING = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "build", "dist", ".venv*")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, in a folder with a space in its name."""
    copy = tmp_path_factory.mktemp("a checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=PASSING)
        else:
            shutil.copy(source, copy / name)
    for name in PAGES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheels(checkout: Path) -> dict[str, Path]:
    """The wheels, by package."""
    return {package: built(checkout / folder, checkout / "dist") for package, folder in PROJECTS.items()}


@pytest.fixture(scope="module")
def sources(checkout: Path) -> dict[str, Path]:
    """The source distributions, by package."""
    return {
        package: Path(next(SdistBuilder(str(checkout / folder)).build(directory=str(checkout / "dist"))))
        for package, folder in PROJECTS.items()
    }


def built(project: Path, target: Path, version: str = "standard") -> Path:
    return Path(next(WheelBuilder(str(project)).build(directory=str(target), versions=[version])))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> Message:
    return email.message_from_string(read(wheel, "METADATA"))


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (key for key in archive.namelist() if key.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def unpacked(source: Path, folder: Path) -> Path:
    with tarfile.open(source) as archive:
        # Python 3.11.0 to 3.11.3 do not support extraction filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    (project,) = folder.iterdir()
    return project


def template(checkout: Path) -> set[str]:
    """Return the template files in the gymsdk wheel."""
    return {name.replace("cookiecutter-env", "gymsdk/template", 1) for name in files(checkout / "cookiecutter-env")}


def files(package: Path) -> Iterator[str]:
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(package.parent).as_posix()


@pytest.mark.parametrize("package", PROJECTS)
def test_a_wheel_contains_its_complete_package_with_metadata_and_no_local_path(
    package: str, checkout: Path, wheels: dict[str, Path], sources: dict[str, Path]
) -> None:
    wheel = wheels[package]
    held = {name for name in names(wheel) if ".dist-info/" not in name}
    beside = STARTUP.get(package, set()) | (template(checkout) if package == "gymsdk" else set())
    if package in FURTHER:
        beside |= set(files(checkout / PROJECTS[package] / FURTHER[package]))
    assert held == set(files(checkout / PROJECTS[package] / package)) | beside
    assert f"{package}/py.typed" in held
    assert "Apache License" in read(wheel, "licenses/LICENSE")
    fields = metadata(wheel)
    assert (fields["License-Expression"], fields["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert fields["Summary"]
    assert len(fields.get_payload()) > 200, "the README is its page"
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert {"Typing :: Typed", *pythons} <= set(fields.get_all("Classifier", []))
    needed = {"gymsdk"} if package in ENVIRONMENTS else required(wheel)
    assert required(wheel) == needed - {"openai", "ray", "vllm", "trl", "cookiecutter", "matplotlib"}
    assert "file:" not in read(wheel, "METADATA")
    with tarfile.open(sources[package]) as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("PKG-INFO"))
        assert b"file:" not in archive.extractfile(name).read()


NEWER = {"gym_env_math": "0.2.0"}
"""The versions of packages whose rewards changed since the version of gymsdk."""


def test_all_other_versions_are_the_same_and_the_changelog_has_them(wheels: dict[str, Path], checkout: Path) -> None:
    versions = {package: metadata(wheel)["Version"] for package, wheel in wheels.items()}
    assert {package: versions.pop(package) for package in NEWER} == NEWER
    [version] = set(versions.values())
    assert f"\n## [{version}]" in (checkout / "CHANGELOG.md").read_text()


def entry_points(wheel: Path) -> dict[str, dict[str, str]]:
    points = ConfigParser()
    points.read_string(read(wheel, "entry_points.txt"))
    return {section: dict(points[section]) for section in points.sections()}


def test_gymsdk_installs_the_command_and_all_plugins_and_an_environment_its_name(
    wheels: dict[str, Path], checkout: Path
) -> None:
    declared = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entry_points(wheels["gymsdk"]) == {"console_scripts": {"gymsdk": "gymsdk.__main__:main"}, **declared}
    assert declared["pytest11"] == {"gymsdk": "gymsdk.checks.pytest_plugin"}
    assert {"scripted", "openai", "vllm", "endpoint"} <= declared["gymsdk.models"].keys()
    for package in ENVIRONMENTS:
        names_of = {package.removeprefix("gym_env_"): package}
        assert entry_points(wheels[package])["gymsdk.environments"] == names_of


def test_the_nemo_gym_commands_are_a_separate_distribution(wheels: dict[str, Path]) -> None:
    assert entry_points(wheels["gymsdk_nemo_compat"])["console_scripts"] == {
        "gym": "gymsdk_nemo_compat.gym:main",
        "ng": "gymsdk_nemo_compat.gym:main",
        "ng_run": "gymsdk_nemo_compat.commands:ng_run",
        "ng_status": "gymsdk_nemo_compat.commands:ng_status",
        "ng_collect_rollouts": "gymsdk_nemo_compat.collect:ng_collect_rollouts",
        "nemo_gym_run": "gymsdk_nemo_compat.commands:ng_run",
        "nemo_gym_status": "gymsdk_nemo_compat.commands:ng_status",
        "nemo_gym_collect_rollouts": "gymsdk_nemo_compat.collect:ng_collect_rollouts",
    }
    needed = {"aiohttp", "gymsdk", "multidict", "omegaconf", "pydantic", "typer", "yarl"}
    assert required(wheels["gymsdk_nemo_compat"]) == needed
    assert "nemo_gym/rollout_collection.py" in names(wheels["gymsdk_nemo_compat"])
    assert not any(name.startswith("nemo_gym/") for name in names(wheels["gymsdk"]))


def test_a_wheel_contains_the_complete_template(checkout: Path, wheels: dict[str, Path]) -> None:
    project = "gymsdk/template/{{cookiecutter.__project}}"
    assert {f"{project}/.gitignore", f"{project}/.github/workflows/ci.yml"} <= names(wheels["gymsdk"])
    written = [name for name in template(checkout) if name.endswith(".py")]
    assert written == ["gymsdk/template/hooks/pre_gen_project.py"], "what is compiled would be copied into projects"
    with zipfile.ZipFile(wheels["gymsdk"]) as archive:
        compile(archive.read(written[0]), written[0], "exec")


@pytest.mark.slow
def test_the_command_of_a_wheel_creates_a_new_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheels["gymsdk"]) as archive:
        archive.extractall(site)
    compileall.compile_dir(site / "gymsdk" / "template", quiet=2)
    command = [sys.executable, "-m", "gymsdk", "new", "maze"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, check=True, timeout=60)
    written = set(files(tmp_path / "gym-env-maze"))
    assert "gym-env-maze/gym_env_maze/__init__.py" in written
    assert {path.name for path in (tmp_path / "gym-env-maze").rglob("__pycache__")} == set()


def required(wheel: Path) -> set[str]:
    needs = [need for need in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in need]
    return {re.match(r"[\w.-]+", need)[0] for need in needs}


@pytest.mark.slow
@pytest.mark.parametrize("package", PROJECTS)
def test_the_sources_build_the_same_wheel(
    package: str, tmp_path: Path, wheels: dict[str, Path], sources: dict[str, Path]
) -> None:
    project = unpacked(sources[package], tmp_path)
    rebuilt = built(project, tmp_path)
    assert names(rebuilt) == names(wheels[package])
    assert read(rebuilt, "METADATA") == read(wheels[package], "METADATA")


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of an editable install of the checkout."""
    return built(checkout, tmp_path_factory.mktemp("editable"), "editable")


def test_an_editable_install_includes_the_environments_and_the_start_up_hook_but_no_template(editable: Path) -> None:
    needs = metadata(editable).get_all("Requires-Dist", [])
    brought = {need.partition(" @ ")[0]: need for need in needs if " @ " in need}
    assert set(brought) == {package.replace("_", "-") for package in BESIDE}
    assert all(need.endswith(' ; extra == "dev"') for need in brought.values())
    assert STARTUP["gymsdk"] <= names(editable)
    assert not any("template" in name for name in names(editable))


@pytest.mark.usefixtures("editable")
@pytest.mark.parametrize("package", BESIDE)
def test_installed_environments_run_from_the_checkout(package: str, checkout: Path) -> None:
    (wheel,) = (checkout / "build" / "editable").glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (pointer,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert set(archive.read(pointer).decode().splitlines()) == {str(checkout / PROJECTS[package])}
    assert f"{package}/__init__.py" not in names(wheel)


@pytest.mark.slow
def test_an_editable_install_of_unpacked_sources_needs_no_environments(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    project = unpacked(sources["gymsdk"], tmp_path)
    assert "file:" not in read(built(project, tmp_path, "editable"), "METADATA")
