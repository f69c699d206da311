from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymsdk import load
from gymsdk.errors import BadRow
from gymsdk.rollouts.fingerprint import compute_fingerprint
from gymsdk.rollouts.plan import Plan, build_settings, describe_host, describe_start, list_differences
from gymsdk.types import Budget

PLAN = Plan(environments={"sums": {}}, model="scripted/oracle")


def _settings(plan: Plan) -> dict[str, Any]:
    environments = {name: load(name, **given) for name, given in plan.environments.items()}
    written: dict[str, Any] = json.loads(json.dumps(build_settings(plan, environments)))
    return written


def _differences(**changed: Any) -> list[str]:
    return list_differences(_settings(PLAN), _settings(PLAN.model_copy(update=changed)))


@pytest.fixture(autouse=True)
def _sums(installed: Callable[..., Path]) -> None:
    installed()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"model": "scripted/null"}, "--model was scripted/oracle, now scripted/null"),
        ({"seed": 1}, "--seed was 0, now 1"),
        ({"repeats": 4}, "--repeats was 1, now 4"),
        ({"limit": 7}, "--limit was not given, now 7"),
        ({"split": "test"}, "--split of sums was train, now test"),
        ({"skip_bad_rows": True}, "--skip-bad-rows was not given, now given"),
        ({"sampling": {"temperature": 0.5}}, "--temperature was not given, now 0.5"),
        ({"model_options": {"pinned": {"top_k": 5}}}, "--pin top_k was not given, now 5"),
        ({"model_options": {"tokens": True}}, "--token-ids was not given, now given"),
        ({"sampling": {"stop": ["x"]}}, "--param stop was not given, now ['x']"),
        ({"budget": Budget(turns=3)}, "--turns was 32, now 3"),
        ({"budget": Budget(tools=3)}, "--tool-calls was 128, now 3"),
        ({"budget": Budget(seconds=3)}, "--deadline was 600.0, now 3.0"),
        ({"environments": {"sums": {"digits": "4"}}}, "--set sums.digits was 3, now 4"),
    ],
)
def test_each_difference_is_named_by_its_option(changed: dict[str, Any], expected: str) -> None:
    assert _differences(**changed) == [expected]


def test_equal_settings_have_no_differences_and_the_address_of_the_model_may_change() -> None:
    assert _differences() == []
    assert _differences(model_options={"base_url": "http://127.0.0.1:8001/v1"}) == []
    assert _differences(environments={"sums": {"digits": "3"}}) == []


def test_a_tasks_file_is_compared_by_content_not_by_name(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_text("{}\n")
    same.write_text("{}\n")
    other.write_text("{} \n")
    before = _settings(PLAN.model_copy(update={"tasks": one}))
    assert list_differences(before, _settings(PLAN.model_copy(update={"tasks": same}))) == []
    changed = list_differences(before, _settings(PLAN.model_copy(update={"tasks": other})))
    assert changed == ["the content of the --tasks file has changed"]
    assert list_differences(before, _settings(PLAN)) == ["--tasks was given, now not given"]


@pytest.mark.parametrize(("name", "reason"), [("missing", "the path does not exist"), ("", "the path is a folder")])
def test_a_missing_tasks_file_is_reported(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(BadRow, match=f"{reason}; name a JSONL file"):
        _settings(PLAN.model_copy(update={"tasks": tmp_path / name}))


def test_changed_code_of_an_environment_and_another_version_are_differences(tmp_path: Path) -> None:
    before, without = _settings(PLAN), _settings(PLAN)
    del without["environments"]["sums"]
    assert "the version of environment 'sums' was not given, now 1.0" in list_differences(without, before)
    about = tmp_path / "site" / "env_sums-1.0.dist-info" / "METADATA"
    about.write_text(about.read_text().replace("1.0", "1.1"))
    assert list_differences(before, _settings(PLAN)) == ["the version of environment 'sums' was 1.0, now 1.1"]
    about.write_text(about.read_text().replace("1.1", "1.0"))
    with (tmp_path / "site" / "env_sums.py").open("a") as file:
        file.write("# changed\n")
    assert list_differences(before, _settings(PLAN)) == ["the code of environment 'sums' has changed"]


def test_a_packages_fingerprint_covers_its_data_but_not_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packaged"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    import packaged

    fingerprints = [compute_fingerprint(packaged)]
    for path in (package / "data" / "train.jsonl", package / "__pycache__" / "x.pyc"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        fingerprints.append(compute_fingerprint(packaged))
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]
    del sys.modules["packaged"]


def test_settings_are_written_with_defaults_and_without_secrets() -> None:
    written = _settings(PLAN.model_copy(update={"environments": {"sums": {"key": "hush"}}}))
    settings = written["environments"]["sums"]["settings"]
    assert settings["digits"] == 3
    assert "hush" not in json.dumps(written)


def test_the_command_is_recorded_without_keys_and_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://me:hush@127.0.0.1:1/v1"
    monkeypatch.setattr(sys, "argv", ["/bin/gymsdk", "rollout", "sums", "--base-url", address, "--set", "key=hush2"])
    plan = PLAN.model_copy(update={"model": "vllm/x", "model_options": {"base_url": address}})
    written = describe_start(plan, [load("sums", key="hush2")])
    assert "hush" not in json.dumps(written)
    assert written["command"] == "gymsdk rollout sums --base-url 'http://***@127.0.0.1:1/v1' --set 'key=***'"
    assert written["base_url"] == "http://***@127.0.0.1:1/v1"


def test_every_installed_version_is_recorded() -> None:
    versions = describe_host()["distributions"]
    assert versions["env_sums"] == "1.0"
    assert {"pydantic", "pluggy", "orjson"} <= versions.keys()


UNUSUAL_SETTINGS = """
import re
from typing import Any
from gymsdk import Config, Verdict, hookimpl

class Thing:
    def __init__(self, name):
        self.name = name

class Odd(Config):
    model_config = {"arbitrary_types_allowed": True}

    words: set[str] = {f"word{number}" for number in range(40)}
    groups: dict[str, frozenset[int]] = {"a": frozenset({3, 1, 2})}
    thing: Any = Thing("one")
    most: float = float("inf")

@hookimpl
def verify(config: Odd):
    return Verdict(reward=0.0)
"""

PRINT_SETTINGS = """
import json
from gymsdk import load
from gymsdk.rollouts.plan import Plan, build_settings
plan = Plan(environments={"odd": {}}, model="scripted/oracle")
print(json.dumps(build_settings(plan, {"odd": load("odd")})))
"""


def _read_from_subprocess(site: Path, seed: int) -> dict[str, Any]:
    """Return the settings of `odd` as another process writes them, with a different order of sets."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", PRINT_SETTINGS], env=environment, capture_output=True, check=True)
    written: dict[str, Any] = json.loads(done.stdout)
    return written


@pytest.mark.slow
def test_sets_and_objects_give_equal_settings_in_every_process(installed: Callable[..., Path]) -> None:
    site = installed("odd", UNUSUAL_SETTINGS)
    one, other = (_read_from_subprocess(site, seed) for seed in (1, 2))
    assert list_differences(one, other) == []
    assert one["environments"]["odd"]["settings"]["groups"] == {"a": [1, 2, 3]}
    assert one["environments"]["odd"]["settings"]["thing"] == "Thing"


def test_a_setting_that_is_not_json_is_compared_by_its_input_text(installed: Callable[..., Path]) -> None:
    source = UNUSUAL_SETTINGS.replace("thing: Any", "thing: Annotated[Any, BeforeValidator(Thing)]").replace(
        "from typing import Any", "from pydantic import BeforeValidator\nfrom typing import Annotated, Any"
    )
    installed("odd", source)
    one, other = (_settings(PLAN.model_copy(update={"environments": {"odd": {"thing": name}}})) for name in "ab")
    assert list_differences(one, other) == ["--set odd.thing was a, now b"]
