"""Plugins of all groups: providers of models, executors, and groups that gymsdk does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gymsdk
from cli.conftest import Command
from gymsdk.config import Deployment, load_config
from gymsdk.deploy.process import use_offload
from gymsdk.errors import BrokenPlugin, MissingExtra, UnknownModel, UsageError
from gymsdk.plugins import registry
from gymsdk.workers import offload

PROVIDER = """
from gymsdk.models.scripted import ScriptedModel
from gymsdk import responses

def build(name, options):
    async def choose(request, episode):
        return [responses.build_message(f"{name} {options.base_url} {options.timeout:g}", id="m")]
    return ScriptedModel(name, choose)

def build_nothing(name, options):
    return None

def fail(name, options):
    raise ValueError("no licence")

value = 3
"""

EXECUTOR = """
class Counting:
    waiting = 0
    calls = 0
    async def run(self, work, *args, **kwargs):
        Counting.calls += 1
        return work.function(*args, **kwargs)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs the distribution `acme` with entry points and modules."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def make(points: str, **modules: str) -> None:
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / "acme-2.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.1\nSummary: Models of Acme.\n")
        (info / "entry_points.txt").write_text(points)

    yield make
    for name in set(sys.modules) - known:
        if name.startswith("acme_"):
            del sys.modules[name]


@pytest.fixture
def acme(install: Callable[..., None]) -> None:
    """Providers: one that works, and one for each way to be broken; an executor; a group of a later version."""
    install(
        "[gymsdk.models]\nacme = acme_models:build\nnone = acme_models:build_nothing\nfails = acme_models:fail\n"
        "value = acme_models:value\ngone = acme_gone:build\ntorn = acme_torn:build\nopenai = acme_models:build\n"
        "paid = acme_paid:build [paid]\n"
        "[gymsdk.executors]\ncounting = acme_executors:Counting\n"
        "[gymsdk.sandboxes]\nbox = acme_models:value\n[other.group]\nx = acme_models\n",
        acme_models=PROVIDER,
        acme_executors=EXECUTOR,
        acme_torn="raise RuntimeError('torn')\n",
        acme_paid="import not_there_at_all\n",
    )


@pytest.mark.usefixtures("acme")
async def test_a_provider_of_another_distribution_builds_models() -> None:
    model = gymsdk.model("acme/big/one@http://127.0.0.1:1/v1", timeout=7)
    response = await model.respond({"input": "hi"})
    assert response["output"][0]["content"][0]["text"] == "big/one ('http://127.0.0.1:1/v1',) 7"


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none/x", UsageError, "model NoneType has no method `respond`"),
        ("fails/x", BrokenPlugin, r"plugin 'fails' \(acme 2.1\) raised ValueError: no licence \(acme_models.py:14\)"),
        ("value/x", BrokenPlugin, "acme_models:value is no function that returns a model"),
        ("gone/x", BrokenPlugin, "its module 'acme_gone' does not exist; reinstall the package"),
        ("torn/x", BrokenPlugin, r"'torn' \(acme 2.1\) cannot be imported: RuntimeError: torn"),
        ("paid/x", MissingExtra, r"'paid' \(acme 2.1\) needs further packages: pip install 'acme\[paid\]'"),
    ],
)
def test_a_broken_provider_is_named_and_harms_only_itself(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gymsdk.model(name)
    assert gymsdk.model("acme/x")
    assert gymsdk.model("scripted/null")


@pytest.mark.usefixtures("acme")
def test_a_provider_cannot_take_the_name_of_one_of_gymsdk() -> None:
    assert type(gymsdk.model("openai/x", api_key="k")).__module__ == "gymsdk.models.openai"
    taken = [entry for entry in registry.list_entries(registry.MODELS) if entry.name == "openai"]
    assert [entry.error for entry in taken] == [None, "gymsdk itself provides 'openai'; choose another name"]


@pytest.mark.usefixtures("acme")
def test_a_provider_of_another_distribution_needs_no_base_url_and_does_not_get_the_policys_key(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(
        "policy_api_key: tell-nobody\n"
        "policy_model:\n  responses_api_models:\n    gymsdk_model:\n      model: acme/big\n"
    )
    [block] = load_config([config]).get_servers("responses_api_models")
    assert (block.kind_settings.name, dict(block.kind_settings.options)) == ("acme/big", {})
    config.write_text(f"{config.read_text()}      base_url: http://127.0.0.1:1\n      api_key: own\n")
    [block] = load_config([config]).get_servers("responses_api_models")
    assert block.kind_settings.options["base_url"] == ("http://127.0.0.1:1/v1",)
    assert block.kind_settings.options["api_key"].get_secret_value() == "own"


@pytest.mark.usefixtures("acme")
def test_an_unknown_provider_is_answered_with_those_of_other_distributions_too() -> None:
    with pytest.raises(UnknownModel, match=r"'acm/x'; did you mean 'acme'\? \(known: acme/NAME, endpoint/NAME, "):
        gymsdk.model("acm/x")


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("provider", ["acme", "vllm"])
def test_gymsdk_disable_hides_a_provider(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_DISABLE", f"x, {provider}")
    with pytest.raises(UnknownModel, match=f"provider '{provider}' is hidden by GYMSDK_DISABLE"):
        gymsdk.model(f"{provider}/x")


@offload.offload()
def add(first: int, second: int) -> int:
    return first + second


@pytest.mark.usefixtures("acme")
async def test_offloaded_functions_run_on_an_executor_of_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_process_executor", {})
    use_offload(Deployment(offload="counting").offload)

    assert await add(1, 2) == 3
    assert sys.modules["acme_executors"].Counting.calls == 1


@pytest.mark.usefixtures("acme")
def test_all_groups_are_listed_with_their_distributions(gymsdk: Command) -> None:
    listed = {(entry["group"], entry["name"]): entry for entry in json.loads(gymsdk("list", "--plugins", "--json").out)}
    assert {group for group, _ in listed} == {
        "gymsdk.environments",
        "gymsdk.executors",
        "gymsdk.models",
        "gymsdk.sandboxes",
    }
    box = listed["gymsdk.sandboxes", "box"]
    assert (box["distribution"], box["version"], box["error"]) == ("acme", "2.1", None)
    assert listed["gymsdk.models", "vllm"]["distribution"] == "gymsdk"
    assert "does not exist" in listed["gymsdk.models", "gone"]["error"]


@pytest.mark.slow
@pytest.mark.usefixtures("acme")
def test_loading_all_plugins_finds_the_broken_ones(gymsdk: Command) -> None:
    assert gymsdk("list", "--plugins").code == 0
    result = gymsdk("list", "--plugins", "--load")
    assert result.code == 1
    broken = [line.split()[1] for line in result.out.splitlines() if "broken: " in line]
    assert broken == ["gone", "openai", "torn"]
    assert "acme" not in gymsdk("list").out


def test_the_plugins_of_gymsdk_are_those_of_its_project(tmp_path: Path) -> None:
    project = Path(gymsdk.__file__).parents[1] / "pyproject.toml"
    declared = {(point.group, point.name) for point in registry._read_project_points(project)}
    own = {(entry.group, entry.name) for entry in registry.list_entries() if entry.distribution == "gymsdk"}
    assert own == declared
    for entry in registry.list_entries(registry.MODELS):
        assert callable(registry.load_entry(entry))


@pytest.mark.slow
def test_a_source_tree_without_metadata_has_its_plugins(tmp_path: Path) -> None:
    source = Path(gymsdk.__file__).parents[1]
    (tmp_path / "gymsdk").symlink_to(source / "gymsdk")
    (tmp_path / "pyproject.toml").symlink_to(source / "pyproject.toml")
    code = f"""
import importlib.metadata, sys
sys.path.insert(0, {str(tmp_path)!r})
def no_distribution(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.distribution = no_distribution
import gymsdk
assert gymsdk.__file__.startswith({str(tmp_path)!r})
print(gymsdk.model("scripted/null"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "scripted/null\n"
