"""Tests of the verdict on an extraction: the published rules, and arbitrary arguments."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gymsdk
from gymsdk import Environment, Verdict

ROW = {
    "id": 0,
    "responses_create_params": {
        "input": [
            {
                "role": "system",
                "content": "The term 'Hot' has a synonym 'Blazing'.\nThe term 'Hot' has a synonym 'Warm'.",
            },
            {"role": "user", "content": "How do camels cope at noon in the Sahara?"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "get_synonym_value",
                "description": "",
                "parameters": {
                    "properties": {"synonym": {"type": "string", "title": "Synonym", "description": ""}},
                    "type": "object",
                    "required": ["synonym"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
            {
                "type": "function",
                "name": "extract_synonym_values",
                "description": "",
                "parameters": {
                    "properties": {
                        "synonym_values": {"items": {"type": "integer"}, "type": "array", "title": "Synonym Values"}
                    },
                    "type": "object",
                    "required": ["synonym_values"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
        ],
        "parallel_tool_calls": False,
    },
    "expected_synonyms": ["Blazing", "Warm"],
    "expected_synonym_values": [711, 407],
    "minefield_label": "Hot",
    "minefield_label_value": 299,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([711, 407, 299, "Hot"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def environment() -> Environment:
    return gymsdk.load("multineedle")


def call(arguments: str, name: str = "extract_synonym_values", call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}


async def verdict(environment: Environment, *arguments: str) -> Verdict:
    episode = await environment.reset(ROW)
    episode.transcript.items = [call(text) for text in arguments]
    return await environment.verify(episode)


def extraction(values: object) -> str:
    return json.dumps({"synonym_values": values})


def expected_verdict(values: list[int]) -> dict[str, Any]:
    """Return the verdict fields for a list of integers by the published rules."""
    expected: list[int] = [711, 407]
    overlap = sum(1 for value in (711, 407) if value in values) / 2
    return {
        "reward": 1.0 if values == expected else 0.0,
        "accuracy": values == expected,
        "set_overlap": overlap,
        "original_term_minefield_hit": 299 in values,
        "order_instruction_following_failure": values != expected and overlap == 1.0,
        "parsed_synonym_values": values,
    }


@pytest.mark.parametrize(
    ("values", "reward", "overlap", "minefield", "order"),
    [
        ([711, 407], 1.0, 1.0, False, False),
        ([407, 711], 0.0, 1.0, False, True),
        ([711, 407, 407], 0.0, 1.0, False, True),
        ([711, 407, 5], 0.0, 1.0, False, True),
        ([299, 711, 407], 0.0, 1.0, True, True),
        ([711], 0.0, 0.5, False, False),
        ([711, 711], 0.0, 0.5, False, False),
        ([299], 0.0, 0.0, True, False),
        ([5, 6], 0.0, 0.0, False, False),
        ([], 0.0, 0.0, False, False),
    ],
)
async def test_an_extraction_is_graded_by_the_published_rules(environment, values, reward, overlap, minefield, order):
    found = (await verdict(environment, extraction(values))).model_dump(exclude={"components", "grader_timeout"})
    assert found == expected_verdict(values)
    assert (found["reward"], found["set_overlap"]) == (reward, overlap)
    assert found["original_term_minefield_hit"] is minefield
    assert found["order_instruction_following_failure"] is order


@given(st.lists(st.sampled_from([711, 407, 299, 0, -1, 2**62]), max_size=5))
async def test_any_list_of_integers_is_graded_by_the_published_rules(environment, values):
    found = await verdict(environment, extraction(values))
    assert found.model_dump(exclude={"components", "grader_timeout"}) == expected_verdict(values)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{",
        "not json",
        "[711, 407]",
        "null",
        "{}",
        '{"values": [711, 407]}',
        extraction(None),
        extraction("711, 407"),
        extraction(711),
        extraction({"711": 407}),
        extraction([711, "407"]),
        extraction([711, None]),
        extraction([711, 407.5]),
        extraction([711, 407, True]),
        extraction([[711, 407]]),
        extraction([711, 10**30]),
        '{"synonym_values": [711, 1e400]}',
        '{"synonym_values": [711, NaN]}',
        '{"synonym_values": [711, ' + "9" * 5000 + "]}",
        '{"synonym_values": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
async def test_malformed_arguments_earn_nothing_and_do_not_raise(environment, arguments):
    found = (await verdict(environment, arguments)).model_dump()
    assert (found["reward"], found["accuracy"], found["set_overlap"]) == (0.0, False, 0.0)
    assert found["parsed_synonym_values"] == []


async def test_the_last_extraction_is_graded_even_if_an_earlier_one_was_right(environment):
    assert (await verdict(environment, extraction([711, 407]), extraction([407, 711]))).reward == 0.0
    assert (await verdict(environment, extraction([407, 711]), extraction([711, 407]))).reward == 1.0
    assert (await verdict(environment, extraction([711, 407]), "{")).reward == 0.0


async def test_without_an_extraction_nothing_is_earned(environment):
    assert (await verdict(environment)).model_dump()["parsed_synonym_values"] == []


async def test_calls_of_other_tools_are_not_extractions(environment):
    episode = await environment.reset(ROW)
    episode.transcript.items = [call(extraction([711, 407]), name="get_synonym_value")]
    assert (await environment.verify(episode)).reward == 0.0


async def test_extracting_the_term_itself_is_a_minefield_hit(environment):
    found = (await verdict(environment, extraction([711, 407, "Hot"]))).model_dump()
    assert (found["reward"], found["original_term_minefield_hit"]) == (0.0, True)


async def test_integral_floats_are_integers(environment):
    found = (await verdict(environment, extraction([711.0, 407.0]))).model_dump()
    assert (found["reward"], found["parsed_synonym_values"]) == (1.0, [711, 407])


@given(JSON.map(extraction) | JSON.map(json.dumps) | st.text())
async def test_arbitrary_arguments_do_not_raise(environment, arguments):
    found = await verdict(environment, arguments)
    right = json.loads(arguments) == {"synonym_values": [711, 407]} if found.reward else False
    assert found.reward == float(right)
    assert math.isfinite(found.model_dump()["set_overlap"])
    # Any JSON reader must be able to read the verdict on disk.
    assert json.loads(found.model_dump_json())["parsed_synonym_values"] == found.model_dump()["parsed_synonym_values"]


@pytest.mark.slow
@given(st.none() | st.integers() | st.lists(st.integers()) | st.dictionaries(st.text(), JSON))
async def test_arguments_that_are_not_text_do_not_raise(environment, arguments):
    episode = await environment.reset(ROW)
    episode.transcript.items = [call("") | {"arguments": arguments}]
    assert (await environment.verify(episode)).reward == 0.0


async def test_a_row_without_expected_values_is_rejected(environment):
    with pytest.raises(gymsdk.UsageError, match="expected_synonym_values"):
        await environment.reset(ROW | {"expected_synonym_values": []})


async def test_unknown_fields_of_a_row_are_kept(environment):
    assert (await environment.reset(ROW | {"source": "elsewhere"})).task.row()["source"] == "elsewhere"
