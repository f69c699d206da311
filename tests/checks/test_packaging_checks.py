"""The package of an environment: its metadata, its files and its import."""

from __future__ import annotations

import json
from functools import partial

import pytest

from gymsdk.checks.packaging import check_import
from gymsdk.checks.subject import Subject
from gymsdk.plugins import registry

from .conftest import METADATA
from .test_run import SUMS

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "{backend}"

[project]
name = "gym-env-{name}"
version = "1.0"

[tool.hatch.build.targets.wheel]
packages = ["gym_env_{name}"]
{more}
"""


@pytest.fixture
def list_findings(subject, outcome):
    async def run_check(check_id, files=None, source=SUMS):
        result = await outcome(check_id, subject(source, files=files))
        return result.reason or [finding.problem for finding in result.findings]

    return run_check


@pytest.fixture
def editable(subject, site, tmp_path):
    """Return a function that installs a subject as editable, with its package in a separate project folder."""

    def build(*, backend="hatchling.build", more="", files=None, project=PROJECT):
        project_folder = tmp_path / "project"
        installed_subject = subject(SUMS, files=files)
        name = installed_subject.name
        project_folder.mkdir()
        (site.folder / f"gym_env_{name}").rename(project_folder / f"gym_env_{name}")
        (project_folder / "pyproject.toml").write_text(project.format(backend=backend, name=name, more=more))
        about = site.folder / f"gym_env_{name}-1.0.dist-info"
        (about / "direct_url.json").write_text(
            json.dumps({"url": project_folder.as_uri(), "dir_info": {"editable": True}})
        )
        site.reach(project_folder)
        return installed_subject, project_folder

    return build


@pytest.mark.parametrize(
    ("check", "old", "new", "expected"),
    [
        ("metadata", "Summary: Made for a test.\n", "", ["it lacks `description`, a sentence for `gymsdk list`"]),
        ("metadata", "Requires-Python: >=3.11\n", "", ["it lacks `requires-python`"]),
        ("metadata", "Requires-Dist: gymsdk\n", "", ["it does not depend on `gymsdk`"]),
        *(
            ("metadata", "Requires-Dist: gymsdk", f"Requires-Dist: {requirement}", [])
            for requirement in ("gymsdk>=0.1", "gymsdk[openai]>=0.1; python_version>'3'", "GymSDK (>1)")
        ),
        ("page", "License-Expression: MIT", "Classifier: License :: OSI Approved", []),
        ("page", METADATA.partition("\n\n")[2], "# A title\n", ["its README has 9 characters"]),
    ],
)
async def test_the_metadata_is_complete(list_findings, check, old, new, expected):
    assert old in METADATA
    assert await list_findings(f"packaging.{check}", {"METADATA": METADATA.replace(old, new)}) == expected


async def test_a_module_that_shadows_the_standard_library_fails(site, outcome):
    about = site.install("calendars", SUMS)
    (about / "entry_points.txt").write_text("[gymsdk.environments]\ncalendars = calendar\n")
    entry = registry.installed()["calendars"]
    result = await outcome("packaging.entry_point", Subject("calendars", partial(registry.load, "calendars"), entry))
    assert [finding.problem for finding in result.findings] == ["its module 'calendar' shadows another package"]


async def test_a_name_like_a_version_fails(list_findings):
    points = "[gymsdk.environments]\n{name}-v3 = gym_env_{name}\n"
    [finding] = await list_findings("packaging.entry_point", {"entry_points.txt": points})
    assert finding.endswith("ends like a Gymnasium version; remove the `-v<digits>`")


async def test_a_file_that_was_not_installed_is_named(list_findings):
    record = "gym_env_{name}/__init__.py,,\ngym_env_{name}/py.typed,,\n"
    [finding] = await list_findings("packaging.files", {"RECORD": record, "data/train.jsonl": "{}"})
    assert finding.startswith("not shipped: gym_env_made1/data/train.jsonl")


async def test_files_beside_the_package_are_named(list_findings, site):
    for path in ("tests/test_it.py", "notes.txt"):
        (site.folder / path).parent.mkdir(exist_ok=True)
        (site.folder / path).touch()
    record = "gym_env_{name}/__init__.py,,\ngym_env_{name}/py.typed,,\ntests/test_it.py,,\nnotes.txt,,\n../bin/it,,\n"
    assert await list_findings("packaging.files", {"RECORD": record}) == [
        "it ships notes.txt, tests beside the package"
    ]


async def test_an_install_without_a_file_list_or_without_metadata_is_skipped(subject, outcome, site):
    installed = subject(SUMS)
    assert (await outcome("packaging.metadata", Subject("made", installed.make))).reason == "it is not installed"
    (site.folder / f"gym_env_{installed.name}-1.0.dist-info" / "RECORD").unlink()
    assert (await outcome("packaging.files", installed)).reason == "it was installed without a list of its files"


async def test_an_editable_install_is_checked_by_building_its_wheel(editable, outcome):
    installed_subject, project_folder = editable(files={"data/train.jsonl": "{}"})
    before = sorted(project_folder.rglob("*"))
    assert (await outcome("packaging.files", installed_subject)).status == "passed"
    assert sorted(project_folder.rglob("*")) == before


async def test_files_missing_from_the_wheel_are_named(editable, outcome):
    installed_subject, project_folder = editable(files={"data/train.jsonl": "{}"})
    (project_folder / ".gitignore").write_text("*.jsonl\n")
    result = await outcome("packaging.files", installed_subject)
    assert [finding.problem for finding in result.findings] == ["not shipped: gym_env_made1/data/train.jsonl"]


async def test_a_failing_build_is_reported(editable, outcome):
    installed_subject, _ = editable(more='only-include = "no list"')
    [finding] = (await outcome("packaging.files", installed_subject)).findings
    assert finding.problem.startswith("its wheel cannot be built: ")


async def test_a_missing_build_backend_or_requirement_skips_the_check(editable, outcome):
    installed, project_folder = editable(backend="not_there.build")
    assert (await outcome("packaging.files", installed)).reason == (
        "its build backend 'not_there' is not installed, so no wheel can be built; `pip install hatchling` installs it"
    )
    project = project_folder / "pyproject.toml"
    text = project.read_text().replace("not_there.build", "hatchling.build")
    project.write_text(text.replace('["hatchling"]', '["hatchling", "hatch-not-there>=1"]'))
    assert "hatch-not-there" in (await outcome("packaging.files", installed)).reason


LITTERING = """
import zipfile
from pathlib import Path

def build_wheel(target, *_):
    Path("litter.txt").write_text("")
    with zipfile.ZipFile(Path(target) / "it-1.0-py3-none-any.whl", "w") as archive:
        for path in Path().glob("gym_env_*/*"):
            archive.write(path)
"""


async def test_a_backend_that_leaves_files_works_on_a_copy(editable, outcome):
    installed_subject, project_folder = editable()
    (project_folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "litter"\nbackend-path = ["."]'
    )
    (project_folder / "litter.py").write_text(LITTERING)
    before = sorted(project_folder.rglob("*"))
    assert (await outcome("packaging.files", installed_subject)).status == "passed"
    assert sorted(project_folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("print('hello')", "its import prints 'hello'"),
        ("import warnings; warnings.warn('old', UserWarning)", "its import prints "),
        (
            "from threading import *\nThread(target=Event().wait, args=(9,), name='busy', daemon=True).start()",
            "its import starts the threads busy",
        ),
        ("1 / 0", "it cannot be imported: ZeroDivisionError"),
        ("def it(:", "it cannot be imported: SyntaxError: invalid syntax (/"),
        ("import torch", "its import loads torch"),
    ],
)
async def test_side_effects_of_an_import_are_reported(list_findings, site, line, expected):
    (site.folder / "torch.py").write_text("")
    [finding] = await list_findings("packaging.import", source=f"{SUMS}\n{line}\n")
    assert finding.startswith(expected)


@pytest.mark.slow
async def test_an_expensive_import_is_reported(subject):
    [finding] = await check_import(subject(SUMS), cpu=-1.0)
    assert finding.problem.startswith("its import costs 0.")
