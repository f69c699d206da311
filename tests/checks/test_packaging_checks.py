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
def seen(subject, outcome):
    async def look(check_id, files=None, source=SUMS):
        result = await outcome(check_id, subject(source, files=files))
        return result.reason or [finding.seen for finding in result.findings]

    return look


@pytest.fixture
def edited(subject, site, tmp_path):
    """A subject of an editable install: its package lies in a project of its own."""

    def make(*, backend="hatchling.build", more="", files=None, project=PROJECT):
        home = tmp_path / "project"
        made = subject(SUMS, files=files)
        name = made.name
        home.mkdir()
        (site.folder / f"gym_env_{name}").rename(home / f"gym_env_{name}")
        (home / "pyproject.toml").write_text(project.format(backend=backend, name=name, more=more))
        about = site.folder / f"gym_env_{name}-1.0.dist-info"
        (about / "direct_url.json").write_text(json.dumps({"url": home.as_uri(), "dir_info": {"editable": True}}))
        site.reach(home)
        return made, home

    return make


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Summary: Made for a test.\n", "it lacks `description`, a sentence for `gymsdk list`"),
        ("Requires-Python: >=3.11\n", "it lacks `requires-python`"),
        ("Requires-Dist: gymsdk\n", "it does not depend on `gymsdk`"),
    ],
)
async def test_metadata_that_is_missing_is_named(seen, line, told):
    assert line in METADATA
    assert await seen("packaging.metadata", {"METADATA": METADATA.replace(line, "")}) == [told]


@pytest.mark.parametrize(
    "requirement", ["gymsdk", "gymsdk>=0.1", "gymsdk[openai]>=0.1; python_version>'3'", "GymSDK (>1)"]
)
async def test_the_dependency_on_gymsdk_is_found_in_any_notation(seen, requirement):
    told = METADATA.replace("Requires-Dist: gymsdk", f"Requires-Dist: {requirement}")
    assert await seen("packaging.metadata", {"METADATA": told}) == []


async def test_a_licence_may_be_a_classifier(seen):
    told = METADATA.replace("License-Expression: MIT", "Classifier: License :: OSI Approved")
    assert await seen("packaging.page", {"METADATA": told}) == []


async def test_a_readme_of_a_line_is_hardly_one(seen):
    told = METADATA.partition("\n\n")[0] + "\n\n# A title\n"
    assert await seen("packaging.page", {"METADATA": told}) == ["its README has 9 characters"]


async def test_packaging_checks_skip_an_uninstalled_environment(subject, outcome):
    made = subject(SUMS)
    result = await outcome("packaging.metadata", Subject("made", made.make))
    assert result.reason == "it is not installed"


async def test_a_module_that_shadows_the_standard_library_fails(site, outcome):
    about = site.install("calendars", SUMS)
    (about / "entry_points.txt").write_text("[gymsdk.environments]\ncalendars = calendar\n")
    entry = registry.installed()["calendars"]
    result = await outcome("packaging.entry_point", Subject("calendars", partial(registry.load, "calendars"), entry))
    assert [each.seen for each in result.findings] == ["its module 'calendar' shadows another package"]


async def test_a_name_like_a_version_fails(seen):
    points = "[gymsdk.environments]\n{name}-v3 = gym_env_{name}\n"
    [told] = await seen("packaging.entry_point", {"entry_points.txt": points})
    assert told.endswith("ends like a Gymnasium version; drop the `-v<digits>`")


async def test_a_file_that_was_not_installed_is_named(seen):
    record = "gym_env_{name}/__init__.py,,\ngym_env_{name}/py.typed,,\n"
    [told] = await seen("packaging.files", {"RECORD": record, "data/train.jsonl": "{}"})
    assert told.startswith("not shipped: gym_env_made1/data/train.jsonl")


async def test_files_beside_the_package_are_named(seen, site):
    for path in ("tests/test_it.py", "notes.txt"):
        (site.folder / path).parent.mkdir(exist_ok=True)
        (site.folder / path).touch()
    record = "gym_env_{name}/__init__.py,,\ngym_env_{name}/py.typed,,\ntests/test_it.py,,\nnotes.txt,,\n../bin/it,,\n"
    assert await seen("packaging.files", {"RECORD": record}) == ["it ships notes.txt, tests beside the package"]


async def test_an_install_without_a_file_list_is_skipped(subject, outcome, site):
    made = subject(SUMS)
    (site.folder / f"gym_env_{made.name}-1.0.dist-info" / "RECORD").unlink()
    assert (await outcome("packaging.files", made)).reason == "it was installed without a list of its files"


async def test_of_an_editable_install_the_wheel_is_built(edited, outcome):
    made, home = edited(files={"data/train.jsonl": "{}"})
    before = sorted(home.rglob("*"))
    assert (await outcome("packaging.files", made)).status == "passed"
    assert sorted(home.rglob("*")) == before


async def test_files_missing_from_the_wheel_are_named(edited, outcome):
    made, home = edited(files={"data/train.jsonl": "{}"})
    (home / ".gitignore").write_text("*.jsonl\n")
    result = await outcome("packaging.files", made)
    assert [each.seen for each in result.findings] == ["not shipped: gym_env_made1/data/train.jsonl"]


async def test_a_failing_build_is_reported(edited, outcome):
    made, _ = edited(more='only-include = "no list"')
    [finding] = (await outcome("packaging.files", made)).findings
    assert finding.seen.startswith("its wheel cannot be built: ")


async def test_a_backend_that_is_missing_is_a_reason_to_skip(edited, outcome):
    made, _ = edited(backend="not_there.build")
    result = await outcome("packaging.files", made)
    assert result.reason == (
        "its build backend 'not_there' is not installed, so no wheel can be built; `pip install hatchling` installs it"
    )


async def test_a_missing_build_requirement_skips_the_check(edited, outcome):
    made, home = edited()
    told = (home / "pyproject.toml").read_text().replace('["hatchling"]', '["hatchling", "hatch-not-there>=1"]')
    (home / "pyproject.toml").write_text(told)
    assert "hatch-not-there" in (await outcome("packaging.files", made)).reason


LITTERING = """
import zipfile
from pathlib import Path

def build_wheel(target, *_):
    Path("litter.txt").write_text("")
    with zipfile.ZipFile(Path(target) / "it-1.0-py3-none-any.whl", "w") as archive:
        for path in Path().glob("gym_env_*/*"):
            archive.write(path)
"""


async def test_a_backend_that_leaves_files_builds_a_copy(edited, outcome):
    made, home = edited()
    (home / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "litter"\nbackend-path = ["."]'
    )
    (home / "litter.py").write_text(LITTERING)
    before = sorted(home.rglob("*"))
    assert (await outcome("packaging.files", made)).status == "passed"
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("print('hello')", "its import prints 'hello'"),
        ("import warnings; warnings.warn('old', UserWarning)", "its import prints "),
        (
            "from threading import *\nThread(target=Event().wait, args=(9,), name='busy', daemon=True).start()",
            "its import starts the threads busy",
        ),
        ("1 / 0", "it cannot be imported: ZeroDivisionError"),
        ("def it(:", "it cannot be imported: SyntaxError: invalid syntax (/"),
    ],
)
async def test_side_effects_of_an_import_are_reported(seen, line, told):
    [seen_there] = await seen("packaging.import", source=f"{SUMS}\n{line}\n")
    assert seen_there.startswith(told)


async def test_an_expensive_import_is_reported(subject):
    [told] = await check_import(subject(SUMS), cpu=-1.0)
    assert told.seen.startswith("its import costs 0.")


async def test_a_heavy_import_is_named(seen, site):
    (site.folder / "torch.py").write_text("")
    assert await seen("packaging.import", source=f"{SUMS}\nimport torch\n") == ["its import loads torch"]
