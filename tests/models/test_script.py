"""A scripted policy plays the lines of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymsdk
from gymsdk import responses
from gymsdk.errors import BadModelOption, UnknownModel
from gymsdk.models.scripted import build
from gymsdk.types import Item

LINES = """
{"reasoning": "I need the sum", "calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": "{a"}]}
{"text": "I give up", "when": "error"}
{"text": "it is 3"}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text(LINES)
    return path


async def play(path: Path, *history: Item) -> list[Item]:
    output: list[Item] = (await gymsdk.model(f"scripted/script:{path}").respond({"input": [*history]}))["output"]
    return output


USER = {"role": "user", "content": "What is 1 + 2?"}


async def test_the_lines_are_played_in_order_and_the_last_one_is_repeated(script: Path) -> None:
    thought, first, second = turn = await play(script, USER)
    assert thought["summary"][0]["text"] == "I need the sum"
    assert (first["arguments"], second["arguments"]) == ('{"a": 1}', "{a")
    assert first["call_id"] != second["call_id"]
    history = [USER, *turn]
    for _ in range(2):
        [last] = await play(script, *history, {"role": "user", "content": "And?"})
        assert last["content"][0]["text"] == "it is 3"
        history += [{"role": "user", "content": "And?"}, last]


async def test_a_line_with_a_matching_when_is_preferred(script: Path) -> None:
    _, call, *_ = turn = await play(script, USER)
    [reply] = await play(script, USER, *turn, responses.build_function_call_output(call["call_id"], '{"error": "no"}'))
    assert reply["content"][0]["text"] == "I give up"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"txet": "x"}', "unknown key 'txet'"),
        ('{"calls": [{"arguments": {}}]}', "calls.0.name is missing"),
        ('{"calls": [{"name": "f", "arguments": 7}]}', "calls.0.arguments must be an object, or JSON text"),
        ('{"calls": {"name": "f"}}', "calls must be a list"),
        ('{"text": 7}', "text must be a string"),
        ("{}", 'it has no output; write {"text": ""} for an empty answer'),
        ('{"when": "x"}', "it has no output"),
    ],
)
def test_an_invalid_line_is_reported_with_its_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(f'{{"text": "hi"}}\n{line}\n')
    with pytest.raises(BadModelOption, match="scripted/script") as caught:
        build(f"script:{path}")
    assert f"{path}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_a_script_needs_a_file_with_a_line_for_any_turn(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    for text, message in (
        ("", "is empty; write a line for"),
        ('{"text": "x", "when": "y"}\n', "no line without `when`"),
    ):
        path.write_text(text)
        with pytest.raises(BadModelOption, match=message):
            build(f"script:{path}")
    with pytest.raises(UnknownModel):
        build("script:")
    with pytest.raises(BadModelOption, match="nowhere"):
        build("script:nowhere.jsonl")
