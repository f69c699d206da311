from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gymsdk import BrokenEnvironment, UsageError
from gymsdk.errors import BadConfig, UnknownEnvironment
from gymsdk.plugins.registry import installed, load

GOOD = """
from gymsdk import Config, Verdict, hookimpl

class Settings(Config):
    level: int = 1

@hookimpl
def verify(config: Settings):
    return Verdict(reward=float(config.level))
"""


class Site:
    """A folder of installed distributions with real metadata and any code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name, source=GOOD, *, module=None, point=None, distribution=None, metadata=None):
        """Install an environment *name*: one module of *source*, one entry point."""
        module = module or f"gym_env_{name.replace('-', '_')}"
        distribution = distribution or f"gym-env-{name}"
        if source is not None:
            (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nSummary: Says {name}.\n"
        (info / "METADATA").write_text(text if metadata is None else metadata)
        (info / "entry_points.txt").write_text(f"[gymsdk.environments]\n{name} = {point or module}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def load_error(name, error=BrokenEnvironment):
    with pytest.raises(error) as caught:
        load(name)
    return str(caught.value)


def test_an_installed_environment_is_listed_from_its_metadata_and_loaded_with_its_settings(site):
    site.install("adding")
    site.install("other")
    entry = installed()["adding"]
    assert (entry.distribution, entry.version, entry.summary) == ("gym-env-adding", "1.0", "Says adding.")
    assert (entry.error, "gym_env_adding" in sys.modules) == (None, False)
    environment = load("adding", level=3)
    assert (environment.name, environment.version, environment.config.level) == ("adding", "1.0", 3)
    assert "gym_env_adding" in sys.modules
    assert "gym_env_other" not in sys.modules
    with pytest.raises(BadConfig, match=r"has no setting 'levle'; did you mean 'level'\? Its settings: level"):
        load("adding", levle=3)


def test_an_entry_point_may_name_an_object_in_a_module(site):
    source = "from gymsdk import *\nclass Judge:\n    @hookimpl\n    def verify(self): ...\njudge = Judge()\n"
    site.install("object", source, point="gym_env_object:judge")
    assert installed()["object"].error is None
    assert load("object").name == "object"


def test_an_unknown_name_suggests_the_nearest_and_the_pip_line(site):
    site.install("adding")
    message = load_error("addding", UnknownEnvironment)
    assert message.startswith("no environment named 'addding'; did you mean 'adding'? (installed: ")
    assert message.endswith("; environments are packages: `pip install gym-env-<name>`")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("raise ValueError('no licence')", "ValueError: no licence"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def verify(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_and_affects_no_other(site, source, reason):
    site.install("broken", source)
    site.install("adding")
    message = load_error("broken")
    assert message.startswith(f"environment 'broken' (gym-env-broken 1.0) cannot be imported: {reason}")
    assert load("adding").name == "adding"


@pytest.mark.parametrize(
    ("source", "point", "error", "message"),
    [
        ("from gymsdk import UsageError\nraise UsageError('set HOME')", None, UsageError, "set HOME"),
        (GOOD, "gym_env_odd:judge", BrokenEnvironment, "AttributeError: module 'gym_env_odd' has no attribute 'judge'"),
        ("class Judge: ...", "gym_env_odd:Judge", BrokenEnvironment, "gym_env_odd:Judge is a class; name a module or"),
        (GOOD.replace("verify", "verfy"), None, BrokenEnvironment, "hook 'verfy' does not exist; did you mean 'verif"),
    ],
)
def test_a_package_that_cannot_be_used_is_an_error_that_names_it(site, source, point, error, message):
    site.install("odd", source, point=point)
    assert message in load_error("odd", error)


@pytest.mark.parametrize("point", ["gym_env_gone", "gym_env_gone.deep:judge", ":", "a b"])
def test_a_package_without_its_module_is_listed_with_an_error(site, point):
    site.install("gone", None, point=point)
    site.install("adding")
    error = installed()["gone"].error
    assert error.startswith("its module ")
    assert error.endswith(" does not exist; reinstall the package")
    assert load_error("gone") == f"environment 'gone' (gym-env-gone 1.0): {error}"
    assert installed()["adding"].error is None


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[gymsdk.environments]\nbad = gym_env_bad\n\xff"])
def test_unreadable_entry_points_affect_only_their_own_package(site, content):
    site.install("torn")
    site.install("adding")
    site.install("other", distribution="acme-other")
    (site.folder / "gym_env_torn-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    (site.folder / "acme_other-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    entries = installed()
    assert (entries["torn"].distribution, entries["torn"].version) == ("gym-env-torn", "1.0")
    assert entries["torn"].error.startswith("its entry_points.txt cannot be read ('utf-8' codec can't decode byte 0xff")
    assert "reinstall the package" in load_error("torn")
    assert entries["adding"].error is None
    assert entries.keys() >= {"adding", "math", "torn"}
    assert "other" not in entries
    assert load("adding").name == "adding"


def test_the_first_distribution_on_the_path_counts_if_entry_points_are_unreadable(site, tmp_path, monkeypatch):
    site.install("torn")
    (site.folder / "gym_env_torn-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff")
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    monkeypatch.syspath_prepend(ahead)
    for item in (site, Site(ahead)):
        item.install("adding")
    assert installed()["adding"].error is None


def test_two_distributions_with_the_same_environment_name_are_both_named(site):
    site.install("twice", distribution="gym-env-twice")
    site.install("twice", distribution="acme-twice")
    assert installed()["twice"].error == (
        "2 distributions provide 'twice': acme-twice and gym-env-twice; uninstall all but one"
    )
    assert "acme-twice and gym-env-twice" in load_error("twice")


@pytest.mark.parametrize("metadata", [b"", b"\xff"])
def test_a_package_with_damaged_metadata_is_listed_with_an_error(site, metadata):
    site.install("torn")
    (site.folder / "gym_env_torn-1.0.dist-info" / "METADATA").write_bytes(metadata)
    site.install("adding")
    assert installed()["torn"].error == "its metadata cannot be read; reinstall the package"
    assert installed()["adding"].error is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *(
            (name, f"the name {name!r} ends like a Gymnasium version; remove the `-v<digits>`")
            for name in ("math-v1", "math-v0", "a-v12")
        ),
        *(
            (name, f"the name {name!r} may contain only letters, digits, `_`, `-` and `.`")
            for name in ("a/b", "two words", "-x")
        ),
        ("a-v1-b", None),
    ],
)
def test_a_name_is_no_version_and_can_be_an_argument_of_a_command(site, name, error):
    site.install(name, module="gym_env_odd", distribution="gym-env-odd")
    assert installed()[name].error == error
    if error:
        assert error in load_error(name)


def test_gymsdk_disable_hides_names(site, monkeypatch):
    site.install("adding")
    site.install("hidden")
    monkeypatch.setenv("GYMSDK_DISABLE", "other, hidden")
    assert "hidden" not in installed()
    assert "adding" in installed()
    message = "environment 'hidden' is hidden by GYMSDK_DISABLE; remove it from that variable"
    assert load_error("hidden", UnknownEnvironment) == message


def test_the_message_says_that_no_environment_is_installed(monkeypatch):
    monkeypatch.setenv("GYMSDK_DISABLE", ",".join(installed()))
    assert load_error("maths", UnknownEnvironment) == (
        "no environment named 'maths' (none is installed); environments are packages: `pip install gym-env-<name>`"
    )
