"""`gymsdk check`: a line per check and an exit code."""

from __future__ import annotations

import json
import sys

import pytest
from sums_environment import PLAIN

from gymsdk.checks import models
from gymsdk.checks.run import CHECKS

LOAD = ("--only", "runtime.load")


def test_a_check_that_passes_is_a_line_and_exit_code_0(gymsdk):
    result = gymsdk("check", "sums", *LOAD)
    first, line, _, last = result.out.splitlines()
    assert (result.code, first) == (0, "sums (env_sums 1.0), seed 0")
    assert line.split(maxsplit=2)[:2] == ["ok", "runtime.load"]
    assert last.startswith("1 passed in ")


def test_findings_are_printed_with_reason_and_fix_and_exit_code_1(gymsdk):
    result = gymsdk("check", "sums", "--only", "packaging.metadata")
    assert result.code == 1
    assert "FAIL  packaging.metadata" in result.out
    assert "      problem: it does not depend on `gymsdk`" in result.out
    assert "      why:  " in result.out
    assert '      fix:     add `dependencies = ["gymsdk"]`' in result.out


def test_json_is_the_whole_report(gymsdk):
    result = gymsdk("check", "sums", "--only", "packaging.metadata", *LOAD, "--json", "--seed", 3)
    output = json.loads(result.out)
    assert (output["environment"], output["version"], output["seed"]) == ("sums", "1.0", 3)
    assert [(result["id"], result["status"]) for result in output["results"]] == [
        ("packaging.metadata", "failed"),
        ("runtime.load", "passed"),
    ]
    assert {"problem", "fix"} <= output["results"][0]["findings"][0].keys()


def test_without_hypothesis_its_check_is_skipped_and_refused_if_it_is_the_only_one(gymsdk, monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    result = gymsdk("check", "sums", "--only", "runtime.episode_isolation", *LOAD, "--set", "digits=1")
    assert (result.code, result.err) == (0, "")
    assert "ok    runtime.load " in result.out
    assert "skip  runtime.episode_isolation " in result.out
    assert 'hypothesis is not installed; run: pip install "gymsdk[author]"\n' in result.out
    result = gymsdk("check", "sums", "--only", "runtime.episode_isolation")
    assert (result.code, result.out) == (2, "")
    assert 'no check can run: hypothesis is not installed; run: pip install "gymsdk[author]"' in result.err


def test_output_of_the_environment_stays_out_of_the_results(gymsdk, installed, tmp_path):
    hook = "@hookimpl\ndef verify():\n    return Verdict(reward=0.0)\n"
    installed("loud", f"print('hello')\nfrom gymsdk import *\n{hook}")
    result = gymsdk("check", "loud", *LOAD, "--json")
    assert json.loads(result.out)["results"][0]["findings"][0]["problem"] == "it has no split"
    assert "hello" in result.err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"responses_create_params": {"input": "?"}}\n')
    result = gymsdk("check", "loud", *LOAD, "--json", "--tasks", rows)
    assert json.loads(result.out)["results"][0]["status"] == "passed"


def test_a_turn_budget_too_small_for_the_oracle_is_named_as_the_cause(gymsdk, installed):
    installed(
        "long",
        f"{PLAIN}\n"
        "@hookimpl\ndef step(transcript):\n    return Step(messages=['Go on.'], done='40' in transcript.text())\n"
        "@hookimpl\ndef verify(transcript):\n    return Verdict(reward=float('40' in transcript.text()))\n"
        "@hookimpl\ndef solve(transcript):\n"
        "    said = sum(item.get('role') == 'assistant' for item in transcript.items)\n"
        "    return Message(content=str(said + 1))\n",
    )
    arguments = ("check", "long", "--only", "semantic.oracle_max")
    output = " ".join(gymsdk(*arguments).out.split())
    assert "its budget of turns ended the episode after 32 turns" in output
    assert "allow more with --turns" in output
    assert gymsdk(*arguments, "--turns", 40).code == 0


def test_the_list_shows_every_check(gymsdk):
    ids = [line.split()[0] for line in gymsdk("check", "--list").out.splitlines()]
    assert ids == [check.id for check in CHECKS]
    output = json.loads(gymsdk("check", "--list", "--json", "--skip", "packaging").out)
    assert [check["id"] for check in output] == [name for name in ids if not name.startswith("packaging.")]


def test_a_model_is_checked_and_reported_like_an_environment(gymsdk):
    result = gymsdk("check", "--model", "scripted/echo")
    assert result.code == 0
    assert "ok    model.respond " in result.out
    assert "skip  model.token_ids " in result.out
    assert "3 passed, 2 skipped in" in result.out
    listed = gymsdk("check", "--model", "scripted/echo", "--list").out
    assert [line.split()[0] for line in listed.splitlines()] == [check.id for check in models.CHECKS]


def test_a_finding_about_a_model_has_exit_code_1(gymsdk, tmp_path, monkeypatch):
    info = tmp_path / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gymsdk.models]\nfaulty = checks.faulty_models:build\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = gymsdk("check", "--model", "faulty/ChangesRequest", "--only", "model.respond", "--json")
    report = json.loads(result.out)
    assert (result.code, report["model"], report["distribution"]) == (1, "faulty/ChangesRequest", "faulty")
    assert report["results"][0]["status"] == "failed"
    assert {"problem", "fix"} <= report["results"][0]["findings"][0].keys()


@pytest.mark.slow
def test_skipped_checks_do_not_run(gymsdk):
    assert "page" not in gymsdk("check", "sums", "--only", "packaging", "--skip", "packaging.page").out
