"""Merge configuration files, overrides and included files; a later source wins."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from config.conftest import ReadErrors, Write, list_settings
from hypothesis import given, strategies

from gymsdk.config.read import load_config
from gymsdk.config.yaml import DEFAULT_PLACE, build_node, merge_nodes, to_plain

ORDER = ("low.yaml", "mid.yaml", "late.yaml", "env.yaml", ".env.yaml", "command line")
"""The order of sources, for example an included file, its including file, and the command line: a later source wins."""

LEVELS = dict(zip(ORDER, range(10_001, 10_007), strict=True))
KEY = "port_range_low"


@pytest.mark.parametrize("sources", [pair for size in (1, 2, 6) for pair in combinations(ORDER, size)])
def test_the_later_source_wins(write: Write, sources: tuple[str, ...]) -> None:
    includes = {"mid.yaml": "config_paths: [low.yaml]\n"}
    for name in ORDER[:-1]:
        write(name, includes.get(name, "") + (f"{KEY}: {LEVELS[name]}\n" if name in sources else ""))
    overrides = [f"{KEY}={LEVELS['command line']}"] if "command line" in sources else []
    value, place = list_settings(load_config(["mid.yaml", "late.yaml"], overrides))[KEY]
    assert value == LEVELS[sources[-1]]
    assert place.split(":")[0] == sources[-1]


def test_an_included_file_is_looked_up_next_to_its_file_and_then_in_the_working_folder(write: Write) -> None:
    write("parts/a.yaml", "config_paths: [b.yaml, c.yaml]\n")
    write("parts/b.yaml", "log_level: error\n")
    write("b.yaml", "log_level: debug\n")
    write("c.yaml", "log_format: json\n")
    deployment = load_config(["parts/a.yaml"])
    assert (deployment.logs.level, deployment.logs.format) == ("error", "json")
    assert list_settings(deployment)["log_level"] == ("error", "parts/b.yaml:1")


@pytest.mark.parametrize("home", ["resources_servers/count/configs", "benchmarks/count", "benchmarks"])
def test_a_file_of_a_repository_includes_others_by_the_root_of_the_repository(
    write: Write, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    write(f"{home}/a.yaml", "config_paths: [resources_servers/tool_call/configs/tool_call.yaml]\n")
    write("resources_servers/tool_call/configs/tool_call.yaml", "log_level: error\n")
    file = (Path.cwd() / home / "a.yaml").resolve()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert load_config([file]).logs.level == "error"
    # As in NeMo Gym, the working folder has precedence.
    Path("resources_servers/tool_call/configs").mkdir(parents=True)
    Path("resources_servers/tool_call/configs/tool_call.yaml").write_text("log_level: warning\n")
    assert load_config([file]).logs.level == "warning"


def test_a_file_included_twice_is_read_once_before_the_files_that_include_it(write: Write) -> None:
    write("common.yaml", "log_level: error\n")
    write("a.yaml", "config_paths: [common.yaml]\nlog_level: debug\n")
    write("b.yaml", "config_paths: [common.yaml]\n")
    assert load_config(["a.yaml", "b.yaml"]).logs.level == "debug"


def test_files_that_include_each_other_are_an_error(write: Write, read_errors: ReadErrors) -> None:
    write("b.yaml", "config_paths: [a.yaml]\n")
    [line] = read_errors("\nconfig_paths: [b.yaml]\n")
    assert line.startswith("b.yaml:1: a.yaml includes b.yaml includes a.yaml; ")


JSON = strategies.recursive(
    strategies.integers(0, 3),
    lambda children: strategies.dictionaries(strategies.sampled_from("abc"), children, max_size=3),
    max_leaves=8,
)
MAPPINGS = strategies.dictionaries(strategies.sampled_from("abc"), JSON, max_size=3)


@pytest.mark.slow
@given(MAPPINGS, MAPPINGS)
def test_merging_keeps_the_later_mapping_and_the_other_keys_of_the_earlier_one(earlier, later) -> None:
    def contains(whole, part) -> bool:
        if not isinstance(part, dict):
            return whole == part
        return all(key in whole and contains(whole[key], value) for key, value in part.items())

    merged = to_plain(merge_nodes(build_node(earlier, DEFAULT_PLACE), build_node(later, DEFAULT_PLACE)))
    assert contains(merged, later)
    assert all(merged[key] == earlier[key] for key in earlier.keys() - later.keys())


def test_overrides_merge_mappings_delete_keys_and_replace_lists(write: Write) -> None:
    write("a.yaml", "disallowed_ports: [1, 2]\nlog_dir: logs\nhead_server: {host: 127.0.0.2, port: 5}\n")
    deployment = load_config(["a.yaml"], ["disallowed_ports=[3]", "~log_dir", "++head_server={port: 6}"])
    assert (deployment.port_range.disallowed, deployment.logs.directory) == ((3,), None)
    assert deployment.head_address == ("127.0.0.2", 6)


def test_inherit_from_and_copy_move_and_extend_a_block(write: Write) -> None:
    text = """\
math:
  resources_servers: {math: {entrypoint: app.py, port: 7001}}
hard_math:
  _inherit_from: math
  resources_servers: {math: {port: 7002}}
more_math:
  _copy: hard_math
  resources_servers: {math: {port: 7003}}
"""
    write("a.yaml", text)
    deployment = load_config(["a.yaml"])
    assert {block.name: block.port for block in deployment.servers} == {"hard_math": 7002, "more_math": 7003}


def test_a_deleted_mapping_is_removed_or_replaced(write: Write) -> None:
    write("a.yaml", "math: {resources_servers: {math: {port: 7001}}}\nhead_server: {host: 127.0.0.9, port: 5}\n")
    write("b.yaml", "math: {_delete_key: true}\nhead_server: {_delete_key: true, port: 6}\n")
    deployment = load_config(["a.yaml", "b.yaml"])
    assert (deployment.servers, deployment.head_address) == ((), ("127.0.0.1", 6))


def test_inheriting_from_itself_or_a_missing_key_is_reported(read_errors: ReadErrors) -> None:
    lines = read_errors("a: {_inherit_from: b}\nb: {_copy: a}\nmath:\n  _inherit_from: mth\n")
    assert any(line.startswith("a.yaml:4: math inherits from mth, which does not exist; did you") for line in lines)
    assert any("inherits from a, and so from itself" in line for line in lines)
