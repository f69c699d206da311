from __future__ import annotations

import pytest
from pydantic import ValidationError

from gymsdk import Message, Model, Reset, State, Step, Task, ToolCall, Transcript, Verdict, responses
from gymsdk.errors import format_suggestion
from gymsdk.models.scripted import build
from gymsdk.types import extract_text

THOUGHT = responses.build_reasoning("hm")


def assistant(text):
    return responses.build_message(text)


def test_a_task_has_the_prompt_of_ask():
    assert Task.ask("Hi").input == [{"role": "user", "content": "Hi"}]


def test_a_string_prompt_is_a_user_message():
    task = Task.model_validate({"responses_create_params": {"input": "Hi"}})
    assert task.input == [{"role": "user", "content": "Hi"}]


def test_undeclared_fields_of_a_row_survive():
    row = {"responses_create_params": {"input": "Hi", "temperature": 0.5}, "id": 7, "more": {"deep": [1]}}
    assert Task.model_validate(row).row() == row


@pytest.mark.parametrize("params", [{}, {"input": None}, {"input": 5}, {"input": ["Hi"]}])
def test_a_row_without_a_readable_prompt_is_rejected(params):
    with pytest.raises(ValidationError, match="`input` must be a string or a list of message objects"):
        Task.model_validate({"responses_create_params": params})


@pytest.mark.parametrize("tools", ["search", ["search"], {"name": "search"}])
def test_a_row_with_tools_that_are_not_objects_is_rejected(tools):
    with pytest.raises(ValidationError, match="`tools` must be a list of tool objects"):
        Task.model_validate({"responses_create_params": {"input": "Hi", "tools": tools}})


def test_arguments_given_as_a_mapping_are_written_as_json():
    assert ToolCall(name="go", arguments={"to": "Zürich"}).arguments == '{"to": "Zürich"}'


def test_arguments_given_as_text_stay_verbatim():
    assert ToolCall(name="go", arguments='{"to" :1}').arguments == '{"to" :1}'


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000])
def test_arguments_that_are_not_a_json_object_are_none(text):
    assert ToolCall(name="go", arguments=text).parsed() is None


def test_arguments_are_read_as_a_dict():
    assert ToolCall(name="go", arguments='{"to": 1}').parsed() == {"to": 1}


def test_a_message_joins_the_text_of_its_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}, {"text": "b"}]
    assert Message(role="user", content=parts).text == "ab"


def test_empty_content_has_no_text():
    assert extract_text(None) == ""


def test_a_message_has_the_user_role_by_default():
    messages = Reset(messages=["a", Message(content="b"), Message(role="system", content="c")]).messages
    assert [message.role for message in messages] == ["user", "user", "system"]


def test_a_prompt_may_contain_assistant_messages():
    assert Reset(messages=[Message(role="assistant", content="Hi")]).messages[0].role == "assistant"


def test_a_step_may_not_contain_assistant_messages():
    with pytest.raises(ValidationError, match="role 'assistant' is reserved for the policy"):
        Step(messages=[Message(role="assistant", content="Hi")])


def test_a_state_rejects_undeclared_fields():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        State(count=1)


def test_the_reply_is_the_text_of_the_last_turn():
    items = [
        THOUGHT,
        assistant("first"),
        {"role": "user", "content": "and?"},
        THOUGHT,
        assistant("the "),
        assistant("last"),
    ]
    assert Transcript(items=items).reply == "the last"


def test_the_reply_is_kept_after_a_last_message_of_the_environment():
    assert Transcript(items=[assistant("4"), {"role": "user", "content": "thanks"}]).reply == "4"


@pytest.mark.parametrize("last", [[], [responses.build_function_call_output("c", "ok")]])
@pytest.mark.parametrize("order", [1, -1])
def test_a_turn_with_a_tool_call_is_not_a_reply(last, order):
    turn = [assistant("let me see"), responses.build_function_call("go", "{}", "c")][::order]
    assert Transcript(items=[assistant("before"), {"role": "user", "content": "?"}, *turn, *last]).reply == ""


def test_an_empty_transcript_has_an_empty_reply():
    assert Transcript().reply == ""
    assert Transcript(items=[THOUGHT]).reply == ""


def test_the_text_is_all_policy_text_without_reasoning():
    items = [THOUGHT, assistant("a"), {"role": "user", "content": "b"}, assistant("c")]
    assert Transcript(items=items).text() == "ac"


def test_calls_are_found_by_name_in_their_order():
    items = [responses.build_function_call(name, "{}", name) for name in ("go", "stop", "go")]
    assert [call.call_id for call in Transcript(items=items).calls("go")] == ["go", "go#2"]
    assert len(Transcript(items=items).calls()) == 3


def test_calls_with_missing_fields_or_parsed_arguments_are_accepted():
    items = [{"type": "function_call"}, {"type": "function_call", "name": "go", "arguments": {"a": 1}}]
    assert [(call.name, call.arguments) for call in Transcript(items=items).calls()] == [
        ("", "null"),
        ("go", '{"a": 1}'),
    ]


def test_the_output_of_a_call_is_found_by_its_id():
    transcript = Transcript(items=[responses.build_function_call_output("c", [{"type": "input_text", "text": "ok"}])])
    assert transcript.output("c") == "ok"
    assert transcript.output("d") is None


def test_any_object_with_respond_is_a_model():
    assert isinstance(build("null"), Model)
    assert not isinstance("null", Model)


def test_only_similar_names_are_suggested():
    assert format_suggestion("mathh", ["math", "tool_call"]) == "; did you mean 'math'?"
    assert format_suggestion("zzz", ["math", "tool_call"]) == ""
    assert format_suggestion("mathh", ["math"], "its splits: a") == "; did you mean 'math'? Its splits: a"
    assert format_suggestion("zzz", ["math"], "its splits: a") == "; its splits: a"


@pytest.mark.parametrize("name", ["response", "responses_create_params", "agent_ref"])
def test_a_verdict_may_not_have_a_reserved_field(name):
    with pytest.raises(TypeError, match=f"a verdict cannot have a field '{name}'"):
        type("Wrong", (Verdict,), {"__annotations__": {name: "str"}})


@pytest.mark.filterwarnings("ignore:Field name")
def test_a_task_field_may_not_hide_a_member_of_task():
    with pytest.raises(TypeError, match="a task cannot have a field 'input'"):

        class Odd(Task):  # the class definition itself raises
            input: str
