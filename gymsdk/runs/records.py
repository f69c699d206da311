"""Read the line of a stored rollout into a record: the values that are listed, sorted, filtered and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gymsdk import jsonl, responses
from gymsdk.line import RESULT_FIELDS, SKIPPED, STORED_REWARD, StoredRollout
from gymsdk.metrics import select_numbers
from gymsdk.types import UNMASKED_FIELDS, Item, Row, pair_outputs

PROMPT_CHARS = 120
"""The length of the excerpt of the prompt in a record."""

GIVEN_ANSWER_FIELDS = ("extracted_answer", "given_answer")
"""The fields that hold the answer that was graded, the most specific first."""

ANSWER_FIELDS = (*GIVEN_ANSWER_FIELDS, "answer")
"""The same fields of a line that lists the fields of its verdict. Elsewhere, `answer` may be the right answer."""

HOST_FIELDS = RESULT_FIELDS | UNMASKED_FIELDS.keys() | {SKIPPED, "responses_create_params", "agent_ref"}
"""The keys of a line that belong neither to the row nor to the verdict, beside those that begin with `_ng_`."""

PART = "part/"
"""The prefix of a reward component among the figures of a record."""

ERROR_PREFIXES = ('{"error"', "error:", "Error:")
"""How the output of a failed tool call begins; `gymsdk` and many environments write an object with `error`."""

REASONING, TOKEN_IDS, IMAGES, GRADER_TIMEOUT = 1, 2, 4, 8
"""The bits of `Record.flags`."""


ROW = "row:"
"""The prefix of a field of the row, such as `row:family`, in conditions and in tables."""

MAX_FIELD_CHARS, MAX_FIELD_VALUES, MAX_FIELDS, MAX_FIELD_NUMBER = 200, 32, 64, 1e100
"""The longest text, the most values of a list and of a row, and the largest number that conditions can find."""

Field: TypeAlias = tuple[str, str, float | None]
"""The name of a field, a value as text, and as a number if it is one. A list gives several of them."""


@dataclass(frozen=True, slots=True)
class Record:
    """The values of one rollout.

    Attributes:
        environment: The name of the environment.
        task: The index of the task in the run.
        repeat: The index of the repeat.
        reward: The reward; `None` without one.
        outcome: `scored`, `unscorable` or `failed`.
        ended: Why the episode ended: `done`, or the budget that was used up; `None` if it did not end.
        turns: The number of turns of the policy.
        tool_calls: The number of tool calls.
        tokens: The tokens that the policy read and wrote; `None` if the model's server did not count them.
        seconds: The duration of the rollout.
        model_seconds: The part of *seconds* in which the policy's model was waited for.
        started: When the rollout began, in seconds since the epoch; `None` if unknown.
        answer: The answer that was graded, if the verdict names it.
        failure: The kind, stage and message of the failure; empty for a scored rollout.
        prompt: The beginning of the last message before the policy's first turn.
        flags: Bits: reasoning, token ids, images, time-out of the grader.
        figures: The numbers of the verdict, and the components of the reward as `part/NAME`.
        tools: The number of calls, and of calls that return an error, for each tool.
        digest: What identifies the task in every run; `None` if the line does not say it.
        fields: The fields of the row.
    """

    environment: str
    task: int
    repeat: int
    reward: float | None
    outcome: str
    ended: str | None
    turns: int
    tool_calls: int
    tokens: int | None
    seconds: float | None
    model_seconds: float | None
    started: float | None
    answer: str | None
    failure: tuple[str, str, str]
    prompt: str
    flags: int
    figures: dict[str, float] = field(default_factory=dict)
    tools: dict[str, tuple[int, int]] = field(default_factory=dict)
    digest: str | None = None
    fields: list[Field] = field(default_factory=list)


def parse_record(stored: StoredRollout) -> Record:
    """Return the record of a stored rollout.

    Raises:
        ValueError: The line has neither a response nor a reward.
    """
    if not (stored.is_failure or "response" in stored.line or "reward" in stored.line):
        raise ValueError("it has neither a `response` nor a `reward`")
    timing, opening, output, reward = stored.timing, stored.opening, stored.output, stored.reward
    tools = _count_tools(output)
    listed = stored.verdict_names
    verdict = {name: stored.line[name] for name in (list_verdict_names(stored) if listed is None else listed)}
    total, model_milliseconds = timing.get("total"), stored.stages.get("model")
    tokens = stored.policy_usage.get("total_tokens")
    return Record(
        environment=stored.environment,
        task=stored.task,
        repeat=stored.repeat,
        reward=reward,
        outcome="scored" if reward is not None else stored.outcome,
        ended=stored.ended,
        turns=stored.turns or sum(1 for _ in responses.iter_turn_spans(output)),
        tool_calls=sum(number for number, _ in tools.values()),
        tokens=tokens if isinstance(tokens, int) and tokens > 0 else None,
        seconds=total / 1e3 if jsonl.is_finite_number(total) else None,
        model_seconds=model_milliseconds / 1e3 if jsonl.is_finite_number(model_milliseconds) else None,
        started=timing.get("started"),
        answer=_get_answer(verdict, GIVEN_ANSWER_FIELDS if listed is None else ANSWER_FIELDS),
        failure=("", "", "") if reward is not None else stored.failure,
        prompt=get_prompt(opening)[:PROMPT_CHARS],
        flags=_get_flags(stored, opening, output),
        figures=_select_figures(stored, verdict, is_scored=reward is not None),
        tools=tools,
        digest=stored.digest,
        fields=_list_fields(stored.line, HOST_FIELDS.union(listed or ())),
    )


def get_text(content: object) -> str:
    """Return the text of a message or of a tool's output; empty for content of an unknown form."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def get_prompt(opening: Sequence[Item]) -> str:
    """Return the text of the last message in *opening*, the items before the policy's first turn, on one line."""
    texts = (get_text(item.get("content")) for item in reversed(opening))
    return " ".join(next((text for text in texts if text.strip()), "").split())


def iter_texts(stored: StoredRollout) -> Iterator[str]:
    """Yield the texts of a rollout: messages, reasoning, the names and arguments of calls, and the outputs of tools."""
    for item in (*stored.opening, *stored.output):
        yield from iter_item_texts(item)


def iter_item_texts(item: Item) -> Iterator[str]:
    """Yield the texts of one item."""
    kind = item.get("type", "message")
    if kind == "function_call":
        yield f"{item.get('name')} {item.get('arguments')}"
    elif kind == "function_call_output":
        yield get_text(item.get("output"))
    elif kind == "reasoning":
        yield get_reasoning(item)
    else:
        yield get_text(item.get("content"))


def get_reasoning(item: Item) -> str:
    """Return the text of a reasoning item: its content, else its summary."""
    return get_text(item.get("content")) or get_text(item.get("summary"))


def is_tool_error(output: str) -> bool:
    """Return whether the *output* of a tool call reports an error."""
    return output.startswith(ERROR_PREFIXES)


def list_verdict_names(stored: StoredRollout) -> list[str]:
    """Return the names of the fields on a line that belong to the verdict.

    A line of gymsdk lists them. Of a scored line of another program, each field that no other part of the line owns may
    belong to the verdict. A rollout without a reward and without such a list has no verdict: its fields are the row's.
    """
    names = stored.verdict_names
    if names is not None:
        return names
    if stored.is_own or stored.find_no_reward() is not None:
        return []
    return [key for key in stored.line if key not in HOST_FIELDS and not key.startswith("_ng_")]


def _list_fields(line: Row, others: Container[str]) -> list[Field]:
    """Return the fields of the row with short values: texts, numbers, lists of them, and the members of an object.

    Of a line of another program, the fields of the verdict may be among them.
    """
    # With the rows of the table `field`, this takes about a sixth of the pass over a line.
    fields: list[Field] = []
    for key, value in line.items():
        if key in others or key.startswith("_ng_"):
            continue
        if isinstance(value, dict):
            for name, member in value.items():
                _add_field(fields, f"{ROW}{key}.{name}", member)
        else:
            _add_field(fields, ROW + key, value)
        if len(fields) >= MAX_FIELDS:
            break
    return fields[:MAX_FIELDS]


def _add_field(fields: list[Field], name: str, value: object) -> None:
    """Add the values of a field that conditions can find."""
    if isinstance(value, str):
        if 0 < len(value) <= MAX_FIELD_CHARS:
            fields.append((name, value, None))
    elif isinstance(value, list):
        for single in value[:MAX_FIELD_VALUES]:
            if not isinstance(single, list):
                _add_field(fields, name, single)
    elif isinstance(value, bool):
        fields.append((name, "true" if value else "false", None))
    elif jsonl.is_finite_number(value) and abs(value) <= MAX_FIELD_NUMBER:
        fields.append((name, jsonl.dump_json(value).decode(), float(value)))


def _select_figures(stored: StoredRollout, verdict: Row, *, is_scored: bool) -> dict[str, float]:
    # `gymsdk reverify` writes the reward that a line had before.
    before = select_numbers({STORED_REWARD: stored.stored_reward})
    components = select_numbers(stored.components) if is_scored else {}
    numbers = select_numbers(verdict) | before | {PART + name: value for name, value in components.items()}
    return {name: float(value) for name, value in numbers.items() if jsonl.is_finite_number(value)}


def _get_answer(verdict: Row, names: Sequence[str]) -> str | None:
    value = next((verdict[name] for name in names if verdict.get(name) is not None), None)
    return value if value is None or isinstance(value, str) else jsonl.dump_portable_json(value).decode()


def _get_flags(stored: StoredRollout, opening: Sequence[Item], output: Sequence[Item]) -> int:
    flags = GRADER_TIMEOUT if stored.line.get("grader_timeout") else 0
    for item in output:
        if item.get("type") == "reasoning":
            flags |= REASONING
        if item.get("generation_token_ids"):
            flags |= TOKEN_IDS
    return flags | (IMAGES if any(_has_image(item) for item in (*opening, *output)) else 0)


def _has_image(item: Item) -> bool:
    content = item.get("content") or item.get("output")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "input_image" for part in content
    )


def _count_tools(output: Sequence[Item]) -> dict[str, tuple[int, int]]:
    """Return the number of calls of each tool, and how many of them have an error as their output."""
    calls = [(index, call) for index, call in enumerate(output) if call.get("type") == "function_call"]
    pairs = pair_outputs(output) if calls else {}
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for index, call in calls:
        count = counts[str(call.get("name"))]
        count[0] += 1
        count[1] += index in pairs and is_tool_error(get_text(output[pairs[index]].get("output")))
    return {name: (number, errors) for name, (number, errors) in counts.items()}
