"""Load every configuration file of the released wheels that names only servers that gymsdk has.

A file is in scope if gymsdk has an implementation of each server in the file and in the files that it includes. A file
in scope must load, unless a setting would change rewards and gymsdk does not support the setting; an error reports such
a setting. A file that is not in scope names a server that gymsdk does not have; no error may be about a key.
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
from gymsdk.deploy import plan
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
"""Servers for references that the user of a file must supply."""

NAMES = {RESOURCES: "supplied_environment", AGENTS: "supplied_agent", MODELS: "policy_model"}
UNSUPPORTED = re.compile(r"is not supported; ")
KEY = re.compile(r"has no setting|there is no setting|is not a kind of server|has no kind of server")


def read_settings(path: Path) -> dict[str, Any]:
    """Return the mapping in *path*, or an empty mapping if the file contains something else."""
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def read_with_includes(path: Path, root: Path) -> dict[str, Any]:
    """Return the settings in *path*, merged over the settings in the files of its `config_paths`."""
    settings = read_settings(path)
    base: dict[str, Any] = {}
    for entry in settings.pop("config_paths", None) or []:
        included = next((parent / entry for parent in (path.parent, root) if (parent / entry).is_file()), None)
        base = merge(base, read_with_includes(included, root) if included else {})
    return merge(base, settings)


def merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in override.items():
        merged[key] = (
            merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
        )
    return merged


def iterate_servers(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the implementation of each server in *settings*."""
    for block in settings.values():
        for kind in SERVER_KINDS:
            if isinstance(block, dict) and isinstance(block.get(kind), dict):
                yield from ((kind, name) for name in block[kind] if name != "_delete_key")


def is_implemented(kind: str, implementation: str) -> bool:
    known = {*ENVIRONMENT_ALIASES, *installed()} if kind == RESOURCES else set(IMPLEMENTATIONS[kind])
    return implementation in known


def fill_placeholders(settings: object, key: str = "", kind: str = "") -> Any:
    """Return a value for each `???` in *settings*, at the same position, or None if there is no `???`."""
    if isinstance(settings, dict):
        reference_kind = str(settings.get("type", ""))
        return {
            entry: value
            for entry, below in settings.items()
            if (value := fill_placeholders(below, entry, reference_kind)) is not None
        } or None
    if settings != "???":
        return None
    return NAMES.get(kind, "none") if key == "name" else "http://127.0.0.1:9/v1" if "url" in key else "none"


def iterate_texts(settings: object) -> Iterator[str]:
    if isinstance(settings, (dict, list)):
        for key in settings.values() if isinstance(settings, dict) else settings:
            yield from iterate_texts(key)
    elif isinstance(settings, str):
        yield settings


def build_user_settings(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings that the user of a file must add, and set the environment variables that the file needs."""
    texts = [*iterate_texts(settings)]
    for name in (name for text in texts for name in re.findall(r"\$\{oc\.env:\s*(\w+)\s*\}", text)):
        monkeypatch.setenv(name, "http://127.0.0.1:9/v1")
    referred = {name for text in texts for name in re.findall(r"\$\{(\w+)\}", text)} - settings.keys()
    top_level = {name: "http://127.0.0.1:9/v1" if "url" in name else "none" for name in referred}
    return merge({**ENDPOINT, **top_level}, fill_placeholders(settings) or {})


def find_errors(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the errors of *path* for a user in the folder *root* who has configured a policy endpoint."""
    settings = read_with_includes(path, root)
    user_settings = build_user_settings(settings, monkeypatch)
    supplied = {**SUPPLIED} if "supplied_" in str(user_settings) else {}
    extra = root / "supplied.yaml"
    extra.write_text(yaml.safe_dump({**supplied, **user_settings}))
    files = [str(path.relative_to(root)), "supplied.yaml"]
    try:
        plan.check_deployment(
            config.load_config(files if "policy_model" in settings else [POLICY, *files], folder=root)
        )
    except GymsdkError as error:
        return str(error).splitlines()
    return []


def test_every_configuration_of_a_release_loads_if_gymsdk_has_its_servers(
    released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    unexpected: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in sorted(released.rglob("*.yaml")):
        used_servers = {*iterate_servers(read_with_includes(path, released))}
        if not used_servers or path.name == "supplied.yaml":
            continue
        in_scope = all(is_implemented(*server) for server in used_servers)
        lines = find_errors(path, released, monkeypatch)
        if bad := [line for line in lines if (not UNSUPPORTED.search(line) if in_scope else KEY.search(line))]:
            unexpected[str(path)] = bad
        if in_scope and not lines:
            seen |= {implementation for _, implementation in used_servers}
    assert unexpected == {}
    expected = {"example_multi_step", "example_single_tool_call", "math_with_judge", "vllm_model", "openai_model"}
    expected |= {"simple_agent", "gymnasium_agent"}
    expected |= {*IMPLEMENTATIONS[ENVIRONMENTS]} if (released / ENVIRONMENTS).is_dir() else set()
    assert expected - seen == set()
