"""Every configuration file of the released wheels that names only servers gymsdk has can be loaded.

A file is in scope by one rule: each server in it, and in the files it includes, has an implementation that gymsdk has.
It loads, unless a setting in it would change rewards and has no counterpart: that is an error which says so. In every
other file, a server is missing here, and no complaint is about a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymsdk import config, installed
from gymsdk.config.model import (
    AGENTS,
    ENVIRONMENT_ALIASES,
    ENVIRONMENTS,
    IMPLEMENTATIONS,
    MODELS,
    RESOURCES,
    SERVER_KINDS,
)
from gymsdk.deploy import validate
from gymsdk.errors import GymsdkError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POLICY = "responses_api_models/vllm_model/configs/vllm_model.yaml"
ENDPOINT = {"policy_base_url": "http://127.0.0.1:9/v1", "policy_api_key": "none", "policy_model_name": "policy"}
SUPPLIED = {
    "supplied_environment": {RESOURCES: {"math": {}}},
    "supplied_agent": {
        AGENTS: {
            "simple_agent": {
                "resources_server": {"type": RESOURCES, "name": "supplied_environment"},
                "model_server": {"type": MODELS, "name": "policy_model"},
            }
        }
    },
}
"""Servers for references that a file leaves to its user."""

NAMES = {RESOURCES: "supplied_environment", AGENTS: "supplied_agent", MODELS: "policy_model"}
UNSUPPORTED = re.compile(r"is not supported; ")
KEY = re.compile(r"has no setting|there is no setting|is not a kind of server|has no kind of server")


def loaded(path: Path) -> dict[str, Any]:
    """Return the mapping in *path*, an empty one where the file holds something else."""
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def whole(path: Path, root: Path) -> dict[str, Any]:
    """Return what *path* says, laid over what the files of its `config_paths` say."""
    given = loaded(path)
    under: dict[str, Any] = {}
    for entry in given.pop("config_paths", None) or []:
        there = next((base / entry for base in (path.parent, root) if (base / entry).is_file()), None)
        under = joined(under, whole(there, root) if there else {})
    return joined(under, given)


def joined(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for key, value in over.items():
        both[key] = joined(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def servers(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield kind and implementation of every server in *given*."""
    for block in given.values():
        for kind in SERVER_KINDS:
            if isinstance(block, dict) and isinstance(block.get(kind), dict):
                yield from ((kind, each) for each in block[kind] if each != "_delete_key")


def have(kind: str, implementation: str) -> bool:
    known = {*ENVIRONMENT_ALIASES, *installed()} if kind == RESOURCES else set(IMPLEMENTATIONS[kind])
    return implementation in known


def filled(given: object, key: str = "", kind: str = "") -> Any:
    """Return the values that a user gives for each `???` in *given*, in the same place; `None` where there is none."""
    if isinstance(given, dict):
        its = str(given.get("type", ""))
        return {each: value for each, below in given.items() if (value := filled(below, each, its)) is not None} or None
    if given != "???":
        return None
    return NAMES.get(kind, "none") if key == "name" else "http://127.0.0.1:9/v1" if "url" in key else "none"


def leaves(given: object) -> Iterator[str]:
    if isinstance(given, (dict, list)):
        for each in given.values() if isinstance(given, dict) else given:
            yield from leaves(each)
    elif isinstance(given, str):
        yield given


def by_user(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the user of a file has to add to it, and set the environment variables that it needs."""
    texts = [*leaves(given)]
    for name in (name for text in texts for name in re.findall(r"\$\{oc\.env:\s*(\w+)\s*\}", text)):
        monkeypatch.setenv(name, "http://127.0.0.1:9/v1")
    referred = {name for text in texts for name in re.findall(r"\$\{(\w+)\}", text)} - given.keys()
    tops = {name: "http://127.0.0.1:9/v1" if "url" in name else "none" for name in referred}
    return joined({**ENDPOINT, **tops}, filled(given) or {})


def complaints(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is wrong with *path* for a user in the folder *root* who has named an endpoint for the policy."""
    given = whole(path, root)
    own = by_user(given, monkeypatch)
    needs = {**SUPPLIED} if "supplied_" in str(own) else {}
    extra = root / "supplied.yaml"
    extra.write_text(yaml.safe_dump({**needs, **own}))
    files = [str(path.relative_to(root)), "supplied.yaml"]
    try:
        validate.check_deployment(
            config.load_config(files if "policy_model" in given else [POLICY, *files], folder=root)
        )
    except GymsdkError as error:
        return str(error).splitlines()
    return []


def test_every_configuration_of_a_release_loads_but_for_servers_that_gymsdk_does_not_have(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    wrong: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in sorted(released.rglob("*.yaml")):
        named = {*servers(whole(path, released))}
        if not named or path.name == "supplied.yaml":
            continue
        in_scope = all(have(*each) for each in named)
        lines = complaints(path, released, monkeypatch)
        if bad := [line for line in lines if (not UNSUPPORTED.search(line) if in_scope else KEY.search(line))]:
            wrong[str(path)] = bad
        if in_scope and not lines:
            seen |= {implementation for _, implementation in named}
    assert wrong == {}
    expected = {"example_multi_step", "example_single_tool_call", "math_with_judge", "vllm_model", "openai_model"}
    expected |= {"simple_agent", "gymnasium_agent"}
    expected |= {*IMPLEMENTATIONS[ENVIRONMENTS]} if (released / ENVIRONMENTS).is_dir() else set()
    assert expected - seen == set()
