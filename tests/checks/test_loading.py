"""Checks that run before any episode: each finds its defect and passes healthy environments."""

from __future__ import annotations

import pytest

from gymsdk import Task
from gymsdk.checks.loading import check_splits

from .test_run import SUMS

TOOLS = """
async def add(one: Annotated[int, Field(description="The first.")], other: Annotated[int, Field()] = 1) -> int:
    '''Add two numbers, one to the other.'''
    return one + other

@hookimpl
def tools():
    return [add]
"""
DESCRIBED = ("digits: int = 3", 'digits: int = Field(3, description="How many digits.")')
UNSPLIT = "@hookimpl\ndef verify():\n    return Verdict(reward=0.0)"
SAME_SEED = ("{split}:{seed}", "{seed}")


@pytest.mark.parametrize(
    ("check", "changes", "expected"),
    [
        ("runtime.load", [("digits: int = 3", "digits: int")], ["it does not load with its defaults: environment "]),
        ("runtime.load", [("while True", "while False")], ["none of its splits has a task: train, test"]),
        ("runtime.load", [(SUMS, UNSPLIT)], ["it has no split"]),
        ("runtime.splits", [("while True", "while split == 'train'")], ["the split 'test' has no task"]),
        ("runtime.splits", [('"test"]', '" "]')], ["a split is named ' '"]),
        ("semantic.split_overlap", [SAME_SEED], ["100 of the first 100 rows of 'test' are in 'train' too"]),
        (
            "semantic.split_overlap",
            [SAME_SEED, ("answer=first + second", "answer=first + second, row_id=split")],
            ["100 of the first 100 "],
        ),
        (
            "semantic.split_overlap",
            [SAME_SEED, ('"test"]', '"example"]')],
            "it has a single split; there is nothing to compare",
        ),
        ("runtime.tool_schemas", [(SUMS, SUMS + TOOLS)], []),
        ("runtime.tool_schemas", [], "it has no tools"),
        # A docstring describes the argument `other`.
        ("runtime.descriptions", [DESCRIBED, ("class Sum(", f"{TOOLS}\nclass Sum(")], []),
        (
            "runtime.descriptions",
            [(SUMS, SUMS + TOOLS), ("'''Add two numbers, one to the other.'''", "")],
            [
                "the tool 'add' has no description",
                "the argument 'other' of the tool 'add' has no description",
                "the setting 'digits' has no description",
            ],
        ),
    ],
)
async def test_a_check_before_any_episode_names_what_it_finds(list_findings, check, changes, expected):
    source = SUMS
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    found = await list_findings(check, source)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert [finding[: len(text)] for finding, text in zip(found, expected, strict=True)] == expected


@pytest.fixture
def list_findings(subject, outcome):
    async def run_check(check_id, source, **settings):
        result = await outcome(check_id, subject(source, **settings))
        return result.reason or [finding.problem for finding in result.findings]

    return run_check


async def test_an_environment_without_splits_plays_given_tasks(subject, outcome):
    given_tasks = subject(UNSPLIT)
    given_tasks.file_tasks = [Task.ask("What?")]
    assert (await outcome("runtime.load", given_tasks)).status == "passed"
    assert (await outcome("runtime.splits", given_tasks)).reason == "it has no splits; it plays files of rows"


async def test_a_slow_first_task_fails(subject):
    findings = await check_splits(subject(SUMS), seconds=-1.0)
    assert all("seconds, more than the allowed -1" in finding.problem for finding in findings)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("float", "float('nan')", "a row cannot be written as JSON: ValueError"),
        ("object", "object()", "a row cannot be written as JSON: PydanticSerializationError"),
        ("str", "'\\ud800'", "a row cannot be written as JSON: UnicodeEncodeError"),
    ],
)
async def test_values_that_json_cannot_represent_fail(list_findings, field, value, expected):
    source = SUMS.replace("    answer: int", f"    answer: int\n    more: {field} = None").replace(
        "answer=first + second)", f"answer=first + second, more={value})"
    )
    assert {finding.startswith(expected) for finding in await list_findings("runtime.rows", source)} == {True}


async def test_a_row_that_changes_on_a_round_trip_fails(list_findings):
    source = SUMS.replace("    answer: int", "    answer: int\n    more: int = Field(0, serialization_alias='rest')")
    source = source.replace("answer=first + second)", "answer=first + second, more=2)").replace(
        "class Sum(Task):", "class Sum(Task):\n    model_config = {'serialize_by_alias': True}\n"
    )
    assert set(await list_findings("runtime.rows", source)) == {"written and read back, more of a row changed"}


async def test_integers_beyond_64_bits_pass_until_python_refuses_to_read_them(list_findings):
    assert await list_findings("runtime.rows", SUMS.replace("answer=first + second", "answer=2**80")) == []
    [report, *_] = await list_findings("runtime.rows", SUMS.replace("answer=first + second", "answer=10**5000"))
    assert "4300" in report


async def test_a_prompt_from_reset_is_accepted(list_findings):
    source = SUMS.replace('f"What is {first} + {second}?"', '""')
    assert await list_findings("runtime.prompts", source) != []
    assert (
        await list_findings(
            "runtime.prompts", f"{source}\n@hookimpl\ndef reset():\n    return Reset(messages=['Add.'])"
        )
        == []
    )


async def test_an_image_is_a_prompt(list_findings):
    source = SUMS.replace('f"What is {first} + {second}?"', "[{'type': 'input_image', 'image_url': 'data:,'}]")
    source = source.replace("Sum.ask(", "asked(").replace(
        "@hookimpl\nasync def verify",
        "def asked(content, **fields):\n"
        "    params = {'input': [{'role': 'user', 'content': content}]}\n"
        "    return Sum(responses_create_params=params, **fields)\n\n"
        "@hookimpl\nasync def verify",
        1,
    )
    assert await list_findings("runtime.prompts", source) == []


async def test_a_verdict_that_is_not_json_fails(list_findings):
    source = SUMS.replace("class Sum", "class Graded(Verdict):\n    junk: object\n\nclass Sum")
    reported = await list_findings(
        "runtime.verdicts", source.replace("Verdict(reward=", "Graded(junk=object(), reward=")
    )
    assert reported[0].startswith("the verdict (Graded) cannot be written as JSON: Unable to serialize unknown type")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("{'type': 'object', 'properties': {'a': {'type': 'text'}}}", "parameters.a has the type 'text'"),
        ("{'type': 'object', 'properties': {'a': {'enum': []}}}", "parameters.a has an `enum` without values"),
        ("{'type': 'object', 'properties': {'a': 3}}", "parameters.a is 3 instead of a schema"),
        ("{'type': 'object', 'properties': {}, 'required': ['a']}", "parameters requires a property that it does not"),
        ("{'type': 'object', 'properties': {'a': {'$ref': '#/$defs/A'}}}", "parameters.a refers to '#/$defs/A'"),
        ("[]", "`tools.0.parameters` must be an object"),
    ],
)
async def test_a_wrong_tool_schema_in_a_row_fails(list_findings, shape, expected):
    [finding] = await _list_schema_findings(list_findings, f"'parameters': {shape}")
    assert expected in finding
    assert finding.startswith("tool 'add': ") is (shape != "[]")


async def _list_schema_findings(list_findings, fields):
    prompt = f"{{'input': 'Add.', 'tools': [{{'type': 'function', 'name': 'add', {fields}}}]}}"
    source = SUMS.replace('Sum.ask(f"What is {first} + {second}?", ', f"Sum(responses_create_params={prompt}, ")
    return await list_findings("runtime.tool_schemas", source)


async def test_a_strict_schema_that_is_not_strict_fails(list_findings):
    shape = "{'type': 'object', 'properties': {'a': {'type': 'string'}}}"
    assert await _list_schema_findings(list_findings, f"'strict': True, 'parameters': {shape}") == [
        "tool 'add': parameters is strict but lacks `additionalProperties: false`",
        "tool 'add': parameters is strict but does not require a",
    ]


FROM_FILES = """
class Sum(Task):
    answer: int

@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=0.0)
"""
LINE = '{{"responses_create_params": {{"input": "What is {0} + {0}?"}}, "answer": {0}}}\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "before", "last", "expected"),
    [
        ("runtime.load", 2, "{bad", "data/train.jsonl:3: not valid JSON"),
        ("runtime.rows", 12, "{bad", "data/train.jsonl:13: not valid JSON"),
        (
            "runtime.rows",
            12,
            '{"responses_create_params": {"input": "?"}}',
            "data/train.jsonl:13: the row does not fit",
        ),
    ],
)
async def test_a_bad_row_of_a_file_is_reported_once_with_its_line(subject, outcome, check, before, last, expected):
    train = "".join(LINE.format(number) for number in range(before)) + last
    test = "".join(LINE.format(number) for number in range(100, 112))
    damaged = subject(FROM_FILES, files={"data/train.jsonl": train, "data/test.jsonl": test})
    [finding] = (await outcome(check, damaged)).findings
    assert finding.problem.startswith(expected)
    if check == "runtime.rows":
        for other in ("semantic.split_overlap", "runtime.seed_control"):
            assert (await outcome(other, damaged)).findings == []


async def test_a_bad_generated_row_is_reported_with_its_number(list_findings):
    source = SUMS.replace("while True:", "for number in range(30):").replace(
        "yield Sum.ask(", "yield {'answer': ''} if number == 19 else Sum.ask("
    )
    reported = await list_findings("runtime.rows", source)
    assert reported[0].startswith("row 20 of the split 'train' cannot be read: the row does not fit")
