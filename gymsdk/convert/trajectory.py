"""NeMo Gym 0.7's observations of a rollout: its conversation, turns, model calls and tool calls.

The field names and the rules are those of NeMo Gym's `TrajectoryRecord` and `AgentObservationBundle`, version 1.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gymsdk.convert.tokens import CARRIED_FIELDS
from gymsdk.responses import is_incomplete_response, parse_usage
from gymsdk.types import Item, ModelCall, Rollout, Row, ToolRun, pair_outputs

INVOCATION = "root"
"""The name of the only agent invocation of a rollout."""

TASK_NAMES = ("task_id", "problem_id", "instance_id")
"""The fields of a row that may name its task, in order of precedence."""

TRAINING = frozenset(CARRIED_FIELDS)
"""The fields of an item that only trainers read; NeMo Gym's export refuses a conversation that holds them."""


def get_task_name(row: Row, task: object) -> str:
    """Return the name by which NeMo Gym identifies the task of *row*, which is number *task* of its run."""
    return next((str(row[key]) for key in TASK_NAMES if row.get(key) is not None), str(task))


def build_trajectory(rollout: Rollout, *, task_id: str, rollout_id: str) -> Item | None:
    """Return the `ng_trajectory` of a scored rollout, or `None` if this process did not observe its model calls.

    Args:
        rollout: The rollout.
        task_id: The name of its task, see `task_name`.
        rollout_id: The rollout's name in its run: `TASK-REPEAT`, or the one that the client chose.
    """
    if not rollout.calls:
        return None
    names = name_calls(rollout.calls, rollout_id)
    conversation = _build_conversation(rollout)
    return {
        "schema_version": "1.0",
        "task_id": task_id,
        "rollout_id": rollout_id,
        "invocations": [_build_invocation(rollout, conversation, names)],
        "turns": _build_turns(rollout, conversation, names, {"task_id": task_id, "rollout_id": rollout_id}),
        "model_calls": [_build_model_call(call, name) for call, name in zip(rollout.calls, names, strict=True)],
        "tool_calls": list(_iter_tool_calls(rollout, conversation)),
        "gaps": [],
    }


def build_observations(rollout: Rollout, *, rollout_id: str) -> Item | None:
    """Return the `ng_agent_observations` of a rollout, or `None` if this process did not observe its model calls."""
    if not rollout.calls:
        return None
    invocation = _build_invocation(rollout, _build_conversation(rollout), name_calls(rollout.calls, rollout_id))
    tools = [{"kind": "tool_call", **_build_tool_call(run)} for call in rollout.calls for run in call.tools]
    return {"source": "gymsdk", "records": [invocation, *tools], "gaps": []}


def name_calls(calls: Sequence[ModelCall], rollout_id: str) -> list[str]:
    """Return a name for each model call: the id of its response where no other call of the rollout has it."""
    ids = [call.response.get("id") for call in calls]
    counts = Counter(given for given in ids if isinstance(given, str))
    return [
        given if isinstance(given, str) and given and counts[given] == 1 else f"{rollout_id}-{number}"
        for number, given in enumerate(ids)
    ]


def _build_conversation(rollout: Rollout) -> list[Item]:
    items = (rollout.response or {}).get("output") or []
    return [_clean_item(item) for item in [*rollout.opening, *items]]


def _clean_item(item: Item) -> Item:
    kind = item.get("type") or "message"
    dropped = TRAINING | {"status"} if kind == "reasoning" else TRAINING
    return {"type": kind} | {key: value for key, value in item.items() if key not in dropped and value is not None}


def _build_invocation(rollout: Rollout, output: list[Item], names: Sequence[str]) -> Item:
    return {
        "kind": "agent_invocation",
        "invocation_id": INVOCATION,
        "status": "completed" if rollout.ended == "done" else "incomplete",
        "model_calls": [{"model_call_id": name} for name in names],
        "conversation": output,
    }


def _build_turns(rollout: Rollout, output: list[Item], names: Sequence[str], identity: Item) -> list[Item]:
    turns: list[Item] = []
    steps, before = 0, len(rollout.opening)
    for number, (call, name) in enumerate(zip(rollout.calls, names, strict=True), 1):
        start = before + call.first
        answer = output[start : start + call.count]
        steps += len(call.tools)
        turns.append(
            {
                "invocation_id": INVOCATION,
                **identity,
                "turn_no": number,
                "timestamp": call.started,
                "question": output[:start],
                "answer": [item for item in answer if item["type"] != "reasoning"],
                "reasoning_content": [item for item in answer if item["type"] == "reasoning"] or None,
                "step_count": steps,
                "model_calls": [{"model_call_id": name}],
            }
        )
    resolved = getattr(rollout.verdict, "resolved", None)
    if turns and isinstance(resolved, bool):
        turns[-1]["resolved"] = resolved
    return turns


def _build_model_call(call: ModelCall, name: str) -> Item:
    response, used = call.response, parse_usage(call.response)
    known = isinstance(response.get("usage"), dict)
    reason = (response.get("incomplete_details") or {}).get("reason")
    return {
        "model_call_id": name,
        "started_at": call.started,
        "completed_at": call.started + call.milliseconds / 1e3,
        "duration_ms": call.milliseconds,
        "response": response,
        "response_metadata": _drop_none(
            response_id=response.get("id"),
            model=response.get("model") or None,
            dialect="responses",
            status_code=200,
            response_status="incomplete" if is_incomplete_response(response) else "completed",
            finish_reason=reason,
        ),
        "token_stats": _drop_none(
            prompt_tokens=used.input_tokens if known else None,
            completion_tokens=used.output_tokens if known else None,
            total_tokens=used.total_tokens if known else None,
            reasoning_tokens=used.reasoning_tokens,
            cached_tokens=used.cached_tokens,
        ),
    }


def _build_tool_call(tool_run: ToolRun) -> Item:
    return {
        "invocation_id": INVOCATION,
        "tool_call_id": tool_run.call_id,
        "tool_name": tool_run.name,
        "started_at": tool_run.started,
        "completed_at": tool_run.started + tool_run.milliseconds / 1e3,
        "duration_ms": tool_run.milliseconds,
        "timing_source": "executor",
        "status": "completed" if tool_run.answered else "cancelled",
    }


def _iter_tool_calls(rollout: Rollout, conversation: list[Item]) -> Iterator[Item]:
    """Yield the tool calls of a *rollout* with their outputs in its *conversation*."""
    pairs, before = pair_outputs(conversation), len(rollout.opening)
    for model_call in rollout.calls:
        start = before + model_call.first
        indices = range(start, start + model_call.count)
        calls = (index for index in indices if conversation[index]["type"] == "function_call")
        for index, run in zip(calls, model_call.tools, strict=False):
            output = conversation[pairs[index]].get("output") if index in pairs else None
            yield _build_tool_call(run) | {"output": output}


def _drop_none(**fields: Any) -> Item:
    return {key: value for key, value in fields.items() if value is not None}
