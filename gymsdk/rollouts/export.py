"""Write training files from stored rollouts: conversations for fine-tuning, and pairs for preference optimization.

The files have the conversational formats that TRL, Axolotl and Unsloth read: `messages` for supervised fine-tuning, and
`prompt`, `chosen` and `rejected` for preference optimization. `tools` and the arguments of tool calls are JSON texts,
because `datasets` would otherwise merge the schemas of all tools into one and fill the gaps with nulls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gymsdk.convert import chat
from gymsdk.errors import Failed
from gymsdk.jsonl import dump_json
from gymsdk.line import StoredRollout
from gymsdk.responses import is_incomplete_response, is_on_policy
from gymsdk.rollouts.settings import Selection
from gymsdk.types import Item, Row, pair_outputs

TRUNCATED = "truncated: a budget ended the episode"
LOW_REWARD = "the reward is too low"
DUPLICATE = "the same conversation is exported already"
NO_REWARD = "the reward does not count, or is not a number"
NOT_CHOSEN = "other rollouts of the task are exported"
NOT_EXPRESSIBLE = "Chat Completions cannot express the conversation"
CONSTRAINED = "the decoding of a turn was constrained"
NO_PAIR = "no other rollout of the task differs enough in its reward"
NO_SPLIT = "the conversations of the pair do not begin alike"


@dataclass
class ExportReport:
    """The result of an export.

    Attributes:
        rollouts: The number of scored rollouts that were read.
        written: The number of lines.
        left_out: How many rollouts are in no line, by reason.
    """

    rollouts: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> Row:
        """Return the report as a JSON object."""
        left_out = {reason: count for reason, count in self.left_out.items() if count}
        return {"rollouts": self.rollouts, "written": self.written, "left_out": left_out}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chat messages of a rollout."""

    messages: list[Item]
    tools: list[Item]
    reward: float

    @property
    def key(self) -> bytes:
        """What two equal conversations have in common."""
        return dump_json([self.messages, self.tools])


def export_sft(rollouts: Iterable[StoredRollout], selection: Selection, report: ExportReport) -> Iterator[Row]:
    """Yield a line with `messages`, `tools` and `reward` for each of the best rollouts of each task.

    Args:
        rollouts: The scored rollouts of one run or of several.
        selection: Which rollouts are exported.
        report: Counts the rollouts.
    """
    seen: set[bytes] = set()
    for conversations in _group_by_task(rollouts, selection, report):
        accepted = [conversation for conversation in conversations if selection.accepts_reward(conversation.reward)]
        report.left_out[LOW_REWARD] += len(conversations) - len(accepted)
        written = 0
        for conversation in sorted(accepted, key=lambda conversation: -conversation.reward):
            if conversation.key in seen:
                report.left_out[DUPLICATE] += 1
            elif written == selection.best:
                report.left_out[NOT_CHOSEN] += 1
            else:
                seen.add(conversation.key)
                written += 1
                report.written += 1
                yield {
                    "messages": conversation.messages,
                    "tools": _dump_tools(conversation),
                    "reward": conversation.reward,
                }


def export_dpo(rollouts: Iterable[StoredRollout], selection: Selection, report: ExportReport) -> Iterator[Row]:
    """Yield a line with `prompt`, `chosen` and `rejected` for each pair: the best rollout of a task with the worst.

    The prompt has the messages that both begin with, up to a turn of the policy.

    Args:
        rollouts: The scored rollouts of one run or of several.
        selection: Which pairs are exported.
        report: Counts the rollouts.
    """
    for conversations in _group_by_task(rollouts, selection, report):
        ranked = sorted(
            {conversation.key: conversation for conversation in conversations}.values(),
            key=lambda conversation: -conversation.reward,
        )
        report.left_out[DUPLICATE] += len(conversations) - len(ranked)
        used = 0
        for chosen, rejected in list(zip(ranked, reversed(ranked), strict=True))[
            : min(selection.best, len(ranked) // 2)
        ]:
            gap = chosen.reward - rejected.reward
            if gap <= 0 or gap < selection.min_gap or not selection.accepts_reward(chosen.reward):
                break
            used += 2
            if (pair := _build_pair(chosen, rejected)) is None:
                report.left_out[NO_SPLIT] += 2
                continue
            report.written += 1
            yield pair
        rest = len(ranked) - used
        report.left_out[NOT_CHOSEN if used else NO_PAIR] += rest


def _build_pair(chosen: Conversation, rejected: Conversation) -> Row | None:
    """Return the line of a pair, `None` if the policy has no turn at which the conversations part."""
    common = 0
    for one, other in zip(chosen.messages, rejected.messages, strict=False):
        if one != other:
            break
        common += 1
    # A turn of the policy may consist of a call and its results; the answers begin with the policy's message.
    while common and not _begins_with_policy(chosen.messages[common:], rejected.messages[common:]):
        common -= 1
    if not common or chosen.tools != rejected.tools:
        return None
    return {
        "prompt": chosen.messages[:common],
        "chosen": chosen.messages[common:],
        "rejected": rejected.messages[common:],
        "tools": _dump_tools(chosen),
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
    }


def _begins_with_policy(*parts: Sequence[Item]) -> bool:
    return all(part and part[0]["role"] == "assistant" for part in parts)


def _group_by_task(
    rollouts: Iterable[StoredRollout], selection: Selection, report: ExportReport
) -> Iterator[list[Conversation]]:
    """Yield the conversations of each task, in the order of the tasks' first rollouts."""
    groups: dict[tuple[str, bytes], list[Conversation]] = defaultdict(list)
    for stored in rollouts:
        if selection.environment not in {None, stored.environment}:
            continue
        reward = stored.reward
        if reward is None:
            report.left_out[NO_REWARD] += 1
            continue
        report.rollouts += 1
        # Several runs may number the same tasks differently, so the prompt identifies the task.
        prompt = dump_json([stored.task, stored.params["input"]])
        conversations = groups[stored.environment, prompt]
        # Lines of NeMo Gym name no reason for the end.
        is_truncated = is_incomplete_response(stored.response) if stored.ended is None else stored.ended != "done"
        if is_truncated and not selection.truncated:
            report.left_out[TRUNCATED] += 1
            continue
        if not all(map(is_on_policy, stored.output)):
            report.left_out[CONSTRAINED] += 1
            continue
        try:
            conversations.append(_build_conversation(stored, reward, reasoning=selection.reasoning))
        except Failed:
            report.left_out[NOT_EXPRESSIBLE] += 1
    yield from groups.values()


def _build_conversation(stored: StoredRollout, reward: float, *, reasoning: bool) -> Conversation:
    params, opening = stored.params, stored.opening
    request = params | {"input": [*opening, *stored.output]}
    messages = chat.build_messages(request, thoughts="field" if reasoning else "drop")
    body = chat.build_body(params | {"input": opening})
    return Conversation(_clean_messages(messages, _list_tool_names(request["input"])), body.get("tools") or [], reward)


def _list_tool_names(items: Sequence[Item]) -> list[str | None]:
    """Return the name of the called tool for each output among *items*, `None` for an output without a call."""
    names = {output: items[call].get("name") for call, output in pair_outputs(items).items()}
    return [names.get(index) for index, item in enumerate(items) if item.get("type") == "function_call_output"]


def _clean_messages(messages: Sequence[Item], tool_names: Sequence[str | None]) -> list[Item]:
    """Return *messages* without token ids and with the names of called tools, as training data has them.

    Args:
        messages: The chat messages.
        tool_names: The name of the called tool for each message with the role `tool`.
    """
    kept = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    names = iter(tool_names)
    cleaned = []
    for message in messages:
        fields = {key: message[key] for key in kept if message.get(key) is not None}
        name = next(names) if message["role"] == "tool" else None
        cleaned.append({"role": "", "content": ""} | fields | ({"name": name} if name else {}))
    return cleaned


def _dump_tools(conversation: Conversation) -> str:
    return dump_json(conversation.tools).decode()
