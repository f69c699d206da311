"""Calls of an engine in progress, and the answers that decide how a call goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gymsdk.convert.api import suggest_tool_fix
from gymsdk.convert.apis import OutboundApi
from gymsdk.convert.late_system import has_late_system, is_role_refusal
from gymsdk.convert.token_limits import LimitRefusal, find_limit_refusal
from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.http.backoff import Retries
from gymsdk.types import Item

OUTPUT_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""The fields of the APIs that limit the tokens of an answer."""

TEMPLATE_STATUSES = frozenset({400, 422, 500})
"""The statuses with which engines answer if their chat template refuses a message; llama.cpp answers 500."""


@dataclass(slots=True)
class Call:
    """A call in progress: the request, the body to send, the key for choosing a replica, the retries and the API.

    `is_answered` says whether the last request has an answer,
    `refuses_role` whether this answer may refuse the role of a message, and `moves_system` whether the late system
    messages of the body are user messages.
    """

    request: Item
    body: Item
    sticky_key: str
    retries: Retries
    api: OutboundApi
    is_answered: bool = False
    refuses_role: bool = False
    moves_system: bool = False

    def is_final(self, answer: client.HttpResponse) -> bool:
        """Whether a retry of *answer* cannot help, even if its status usually deserves one."""
        if find_limit_refusal(answer.status, answer.body) is not None:
            return True
        if refuses_role(answer) and not self.moves_system and has_late_system(self.body):
            return True
        return bool(self.request.get("tools") and suggest_tool_fix(answer.text))


class OutputLimitRefused(Exception):
    """The server at *host* refused a call because its output limit does not fit beside the prompt."""

    def __init__(self, host: str, refusal: LimitRefusal) -> None:
        super().__init__(refusal.message)
        self.host = host
        self.refusal = refusal


def build_limit_error(answer: client.HttpResponse, call: Call, refusal: LimitRefusal) -> Exception:
    """Return the error for an output limit that does not fit, final if the call has none."""
    sent = [call.body[key] for key in OUTPUT_LIMITS & call.body.keys()]
    if sent:
        # A server may refuse the very limit that it named.
        is_smaller = refusal.remaining_tokens is not None and refusal.remaining_tokens < min(sent)
        return OutputLimitRefused(answer.host, refusal if is_smaller else replace(refusal, remaining_tokens=None))
    return Failed(
        f"{answer.host} answered {answer.status}: {refusal.message}; the server refuses the request without an output"
        " limit, too; serve the model with a longer context",
        kind="model_bad_request",
    )


def refuses_role(answer: client.HttpResponse) -> bool:
    """Whether the chat template of an engine may have refused the role of a message; pages come from proxies."""
    return answer.status in TEMPLATE_STATUSES and answer.body.lstrip()[:1] != b"<" and is_role_refusal(answer.text)
