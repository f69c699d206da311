"""Truncate long tool outputs, with a note to the policy, wherever a tool is called."""

from __future__ import annotations

from collections.abc import Callable

from gymsdk import Environment, play
from gymsdk.models.scripted import ScriptedModel
from gymsdk.tools import truncate_output
from gymsdk.types import Budget

TALKS = """
async def talk(length: int) -> str:
    "Talk."
    return "a" * length

@hookimpl
def tools():
    return [talk]

@hookimpl
def tasks(split: Literal["train"], seed):
    yield Task.ask("talk")

@hookimpl
async def verify(transcript):
    return Verdict(reward=1.0)
"""


def picture(size: int) -> dict[str, str]:
    return {"type": "input_image", "image_url": "d" * (size - len("input_image"))}


def test_a_long_text_is_truncated_with_a_note_within_the_limit() -> None:
    for output in ("", "a" * 1000, [{"type": "input_text", "text": "a" * 990}], [picture(1000)]):
        assert truncate_output(output, 1000) is output  # type: ignore[arg-type]  # parts are plain dictionaries
    found = truncate_output("a" * 5000, 1000)
    assert isinstance(found, str)
    assert found.endswith("[truncated: this output has 5000 characters; at most 1000 are shown]")
    assert len(found) == 1000
    assert truncate_output(found, 1000) is found


def test_content_parts_that_do_not_fit_are_replaced_by_a_note() -> None:
    text = {"type": "input_text", "text": "b" * 2000}
    shown = truncate_output([picture(500), picture(900), text, picture(400)], 1000)
    assert isinstance(shown, list)
    assert shown[0] == picture(500)
    assert shown[1]["text"].startswith("[omitted: input_image of 900 characters")
    assert shown[2]["text"].startswith("b" * 100)
    assert "truncated" in shown[2]["text"]
    assert "omitted" in shown[3]["text"]


async def test_the_budget_limits_the_output_that_a_policy_sees(
    environment: Callable[..., Environment], policy: Callable[..., ScriptedModel]
) -> None:
    made = environment(TALKS)
    task = next(iter(made.tasks("train")))
    rollout = await play(made, policy([("talk", {"length": 9000})], "done"), task, budget=Budget(output=2000))
    assert rollout.response is not None
    [output] = [item["output"] for item in rollout.response["output"] if item["type"] == "function_call_output"]
    assert len(output) == 2000
    assert "9000 characters" in output
    # The limit is not part of the identity of a run.
    assert Budget(output=2000).model_dump() == Budget().model_dump()
