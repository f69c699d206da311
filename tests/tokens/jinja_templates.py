"""Chat templates in Jinja, applied as transformers applies them, with a tokenizer of bytes and special tokens.

`play_kind` plays a conversation with a template, and classifies each call after the first by comparing its prompt with
the text that the template writes for the whole conversation, with the policy's real turns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gymsdk import responses
from gymsdk.convert import chat, chat_inbound
from gymsdk.convert.apis import get_outbound_api
from gymsdk.errors import Failed, UsageError
from gymsdk.http.client import HttpResponse
from gymsdk.jsonl import dump_json
from gymsdk.models.endpoint import Upstream
from gymsdk.models.options import ModelOptions
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.tokens.bridge import parse_call_arguments
from gymsdk.tokens.tokenizer import render_messages
from gymsdk.types import Item

SPECIAL = re.compile(
    r"<\|[^|<>\n'\"{}]{1,40}\|>|<\uff5c[^\uff5c<>\n]{1,40}\uff5c>|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<(?:bos|eos|pad|unk)>"
    r"|<(?:seed:[a-z]+|SPECIAL_\d+|beginning_of_sentence|end_of_sentence|begin_of_document|sep)>"
    r"|</?(?:assistant|user|system)>"
    r"|<(?:start|end)_of_(?:turn|image)>|\[gMASK\]|<sop>|\]~!?b\[?|\[e~\[|<\|[a-z_]+>|<[a-z_]+\|>|<\|im_[a-z]+\|>"
)
"""The special tokens that the source of a template spells."""

FIRST_SPECIAL_ID = 256

Outcome: TypeAlias = Literal["template", "counted", "marked", "rejected", "different"]
"""What a call after the first continued with: the text of the template, found with placeholder turns or by counting
turns; a conversation that starts anew and is marked; a conversation that the template rejects; or another text."""

NEXT: dict[str, Item] = {
    "user": {"role": "user", "content": "And what is in the next one?"},
    "switch": {"role": "user", "content": "Answer at once. /no_think"},
    "letters": {"role": "user", "content": "ﬁne ½ Ⅳ, Zürich 答 😀\u3000then"},
    "system": {"role": "system", "content": "From now on, answer in one word."},
    "developer": {"role": "developer", "content": "From now on, answer in one word."},
}
"""The messages after a turn without calls."""

OUTPUTS = {"tool": "There are three keys.", "error": '{"error": "no such door"}', "letters": "ﬁne ½ 答\n"}
"""The outputs of tools after a turn with calls."""

TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"{name.title()} at something.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    }
    for name in ("look", "search")
]


@dataclass(frozen=True)
class Step:
    """A turn of the policy, and which message of `NEXT` or `OUTPUTS` follows it.

    Attributes:
        following: The key of the message.
        calls: The number of tool calls.
        reasoning: The reasoning, empty for none.
        is_cut: Whether the generation ends before its end-of-turn token.
        is_empty: Whether the turn has no text.
    """

    following: str = "user"
    calls: int = 0
    reasoning: str = ""
    is_cut: bool = False
    is_empty: bool = False

    def build_output(self, mark: str) -> list[Item]:
        """Return the output items of the turn. Its text, or the argument of its last call, ends with *mark*."""
        items = [responses.build_reasoning(self.reasoning)] if self.reasoning else []
        if not self.calls:
            return [*items, responses.build_message("" if self.is_empty else f"I see one key in there {mark}")]
        marks = [*["the door"] * (self.calls - 1), mark]
        return items + [
            responses.build_function_call(TOOLS[number % 2]["name"], {"at": at}) for number, at in enumerate(marks)
        ]

    def build_following(self, output: list[Item]) -> list[Item]:
        """Return the items after the turn."""
        calls = [item for item in output if item["type"] == "function_call"]
        outputs = [responses.build_function_call_output(call["call_id"], OUTPUTS[self.following]) for call in calls]
        return outputs or [NEXT[self.following]]


@dataclass(frozen=True)
class Kind:
    """A kind of conversation: how it opens, its turns, whether it has tools, and further variables of the template."""

    steps: Sequence[Step]
    system: str = ""
    role: str = "system"
    has_tools: bool = False
    variables: Item = field(default_factory=dict)

    def build_opening(self) -> list[Item]:
        """Return the messages before the first turn."""
        opening: list[Item] = [{"role": self.role, "content": self.system}] if self.system else []
        return [*opening, {"role": "user", "content": "Please look in there, then answer."}]


CALL, TEXT = Step("tool", calls=1), Step()
KINDS = {
    "plain": Kind([TEXT] * 3),
    "system": Kind([TEXT] * 3, "Be kind."),
    "no_think in system": Kind([TEXT] * 3, "/no_think"),
    "thinking off": Kind([TEXT, Step("switch"), TEXT], "Be kind. /think", variables={"enable_thinking": False}),
    "tools": Kind([CALL, TEXT, TEXT], "Be kind.", has_tools=True),
    "tool errors": Kind([Step("error", calls=1), CALL, TEXT], has_tools=True),
    "rounds and user": Kind([CALL, CALL, TEXT, CALL, TEXT, TEXT], "Be kind.", has_tools=True),
    "rounds, no_think": Kind([CALL, CALL, TEXT, CALL, TEXT, TEXT], "/no_think", has_tools=True),
    "parallel calls": Kind([Step("tool", calls=2), TEXT, Step("tool", calls=3), TEXT], "Be kind.", has_tools=True),
    "reasoning": Kind(
        [Step("tool", calls=1, reasoning="Look first."), Step(reasoning="Now I know."), Step(reasoning="Easy."), TEXT],
        "Be kind.",
        has_tools=True,
    ),
    "reasoning at times": Kind([Step(reasoning="Well."), TEXT, Step(reasoning="So."), TEXT], "Be kind."),
    "empty reply": Kind([Step(is_empty=True), TEXT, Step(reasoning="Hm.", is_empty=True), TEXT]),
    "letters": Kind([Step("letters"), Step("letters", calls=1), Step("letters"), TEXT], "½ ﬁne 答", has_tools=True),
    "cut": Kind([Step(is_cut=True), Step(reasoning="Well.", is_cut=True), TEXT], "Be kind."),
    "long": Kind([TEXT, CALL] * 5 + [TEXT], "Be kind.", has_tools=True),
    "late system": Kind([Step("system"), Step("developer"), TEXT], "Be kind.", role="developer"),
}
"""The conversations by name."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the turns of the assistant and writes nothing."""

    tags = {"generation"}  # noqa: RUF012  # the way of Jinja

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Any) -> str:
        return str(caller())


@cache
def compile_template(source: str) -> Any:
    """Return the template in *source*, with the functions and filters that transformers provides."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime(2026, 11, 26).strftime(form)  # noqa: DTZ001
    return environment.from_string(source)


@dataclass
class JinjaTokenizer:
    """A tokenizer with the chat template in *source*: ids 0 to 255 are bytes, and special tokens follow.

    Attributes:
        source: The template.
        variables: Further variables of the template.
    """

    source: str
    variables: Item = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._template = compile_template(self.source)
        self._ids = {text: FIRST_SPECIAL_ID + number for number, text in enumerate(self.special_tokens)}
        self._bytes = [bytes([number]) for number in range(FIRST_SPECIAL_ID)] + [text.encode() for text in self._ids]
        self._pattern = re.compile("(" + "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) + ")")
        self.eos_token_id = self._ids[self.eos]

    @cached_property
    def eos(self) -> str:
        known = "<|im_end|> <|eot_id|> <|return|> <|END_OF_TURN_TOKEN|> <end_of_turn> <|eom_id|> <|end|>"
        return next((text for text in known.split() if text in self.source), "</s>")

    @cached_property
    def special_tokens(self) -> list[str]:
        found = {text.replace("{}", ":opensource") for text in SPECIAL.findall(self.source)}
        return sorted(found | {"<s>", "</s>", self.eos})

    @cached_property
    def added_tokens_decoder(self) -> dict[int, SimpleNamespace]:
        return {number: SimpleNamespace(content=text, special=True) for text, number in self._ids.items()}

    def render(self, messages: list[Item], tools: list[Item] | None, *, prompted: bool, **variables: Any) -> str:
        """Return the text of a conversation. Raises `UsageError` if the template rejects it."""
        try:
            return str(
                self._template.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompted,
                    bos_token="<s>",
                    eos_token=self.eos,
                    pad_token="</s>",
                    unk_token="</s>",
                    **(self.variables | variables),
                )
            )
        except Exception as error:  # a template is a program
            raise UsageError(f"the chat template rejects the messages: {error}") from error

    def apply_chat_template(
        self,
        messages: list[Item],
        /,
        *,
        tools: list[Item] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> list[int]:
        return self.encode(self.render(messages, tools, prompted=add_generation_prompt, **variables))

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for number, span in enumerate(self._pattern.split(text)):
            ids += [self._ids[span]] if number % 2 else [*span.encode("utf-8", "replace")]
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")


class TemplateEngine:
    """An engine without a server; its policy plays the steps of a conversation as the template writes them."""

    def __init__(self, tokenizer: JinjaTokenizer) -> None:
        self.tokenizer = tokenizer
        self.step = Step()
        self.output: list[Item] = []
        self.output_before: list[Item] = []
        self.request: Item = {}
        self.generated: list[int] = []

    async def answer(self, path: str, body: Item, **_: Any) -> HttpResponse:
        """Return the answer to *body* at *path*."""
        try:
            return HttpResponse("engine", 200, dump_json(self._answer(path, body)))
        except UsageError as error:
            return HttpResponse("engine", 400, dump_json({"error": {"message": str(error)}}))

    def _answer(self, path: str, body: Item) -> Item:
        if path == "/detokenize":
            return {"prompt": self.tokenizer.decode(body["tokens"])}
        if path == "chat/completions/render":
            prompted = body["add_generation_prompt"]
            ids = self.tokenizer.encode(self.render(body["messages"], body.get("tools"), prompted=prompted))
            return {"token_ids": ids, "sampling_params": {}}
        if path == "/inference/v1/generate":
            self.generated = self.tokenizer.encode(self._write())
            choice = {"token_ids": self.generated, "finish_reason": "stop"}
            logprobs = [{"logprob": -0.5}] * len(self.generated)
            return {"choices": [choice | {"logprobs": {"content": logprobs}}], "prompt_token_ids": body["token_ids"]}
        answer = chat_inbound.build_answer(responses.build_response(self.output, model="m", usage=None), {})
        if path == "chat/completions/derender":
            return answer
        self.generated = self.tokenizer.encode(self._write())
        tokens = dict(zip(TOKEN_FIELDS, (body["input_ids"], self.generated, [-0.5] * len(self.generated)), strict=True))
        message = answer["choices"][0]["message"] | tokens
        return answer | {"choices": [answer["choices"][0] | {"message": message}]}

    def render(self, messages: list[Item], tools: list[Item] | None, *, prompted: bool) -> str:
        """Return the text of a conversation in the form of Chat Completions."""
        ids = render_messages(
            self.tokenizer, [*map(parse_call_arguments, messages)], tools=tools or None, add_generation_prompt=prompted
        )
        return self.tokenizer.decode(ids)

    def _write(self) -> str:
        """Return what the policy generates: its turn as the template writes it, up to the token that ends it."""
        body = chat.build_body(self.request)
        messages, tools = body["messages"], body.get("tools")
        turn = chat.build_messages({"input": self.output})
        prompt = self.render(messages, tools, prompted=True)
        try:
            whole = self.render([*messages, *turn], tools, prompted=False)
        except UsageError:
            whole = f"{prompt}{get_mark(self.output)}{self.tokenizer.eos}"
        written = whole[count_common(prompt, whole) :]
        mark = get_mark(self.output)
        if mark not in written and any(item["type"] == "function_call" for item in self.output):
            # A template may leave out calls that the policy generated.
            written = f"{mark}{written}"
        end = written.rfind(mark) + len(mark) if mark in written else 0
        if self.step.is_cut:
            return written[:end]
        if (stop := written.find(self.tokenizer.eos, end)) >= 0:
            return written[: stop + len(self.tokenizer.eos)]
        ends = [match.end() for match in SPECIAL.finditer(written, end)]
        return written[: ends[-1]] if ends else written.rstrip() + self._find_stop(messages, turn, tools)

    def _find_stop(self, messages: list[Item], turn: list[Item], tools: list[Item] | None) -> str:
        """Return the token with which the policy ends a turn that the template ends with the start of the next."""
        following = chat.build_messages({"input": self.step.build_following(self.output)})
        try:
            whole = self.render([*messages, *turn, *following], tools, prompted=True)
        except UsageError:
            return self.tokenizer.eos
        found = SPECIAL.search(whole, whole.rfind(get_mark(self.output)))
        return found[0] if found else self.tokenizer.eos


def get_mark(output: list[Item]) -> str:
    """Return the text at the end of a turn, by which it is found in renderings."""
    text = re.findall(r"mark-\d+", json.dumps(output))
    return text[-1] if text else "\0"


def count_common(first: str, second: str) -> int:
    """Return the length of the common beginning."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


@dataclass
class Reference:
    """The text that the template itself writes for the whole conversation, in text."""

    engine: TemplateEngine
    after: dict[str, str] = field(default_factory=dict)
    """The text that the template wrote after each turn, by the turn's mark, when the policy read it."""

    def is_kept(self, whole: str, opening: str) -> bool:
        """Return whether *whole* still contains the *opening* and what was read after each turn."""
        return whole.startswith(opening) and all(
            mark not in whole or whole[whole.rfind(mark) + len(mark) :].startswith(text)
            for mark, text in self.after.items()
        )


def is_same(engine: TemplateEngine, whole: str, mark: str, suffix: str, *, is_cut: bool) -> bool:
    """Return whether *suffix* is what the template writes in *whole* after the generation of the turn with *mark*."""
    if not whole.endswith(suffix):
        return False
    if mark not in whole:
        # The turn has no text, or the template leaves it out.
        return bool(suffix)
    generated = engine.tokenizer.decode(engine.generated)
    written = generated[generated.rfind(mark) + len(mark) :]
    between = whole[whole.rfind(mark) + len(mark) : len(whole) - len(suffix)]
    if is_cut:
        return not SPECIAL.search(between) and bool(SPECIAL.match(suffix.lstrip()))
    if engine.output_before and any(item["type"] == "function_call" for item in engine.output_before):
        # The template may write the call itself in another way than the policy.
        return bool(SPECIAL.search(between)) == bool(SPECIAL.search(written))
    # The token at the end of the last turn of a conversation can be another than that of earlier turns.
    return SPECIAL.sub("", between).strip() == SPECIAL.sub("", written).strip() and len(
        SPECIAL.findall(between)
    ) <= len(SPECIAL.findall(written))


async def play_kind(
    source: str, kind: Kind, interface: TokenInterface, counted: list[str] | None = None
) -> list[tuple[Outcome, str]]:
    """Play a conversation of *kind* with the template in *source*.

    Args:
        source: The template.
        kind: The conversation.
        interface: The token interface: `vllm-generate` knows no special tokens, `sglang` those of the tokenizer.
        counted: A list to which the caller adds an entry for each continuation that counts turns.

    Returns:
        The outcome of each call after the first, and the reason why it is marked.
    """
    tokenizer = JinjaTokenizer(source, kind.variables)
    engine = TemplateEngine(tokenizer)
    options = ModelOptions.model_validate(
        {"base_url": "http://engine/v1", "tokens": True, "token_interface": interface}
        | ({"tokenizer": JinjaTokenizer(source)} if interface == "sglang" else {})
        | {"chat_template_kwargs": kind.variables}
    )
    model = Upstream("m", options, get_outbound_api("chat"), post=engine.answer)
    reference = Reference(engine)
    outcomes: list[tuple[Outcome, str]] = []
    items = kind.build_opening()
    opening, chain, mark = "", [], ""
    for number, step in enumerate(kind.steps):
        request: Item = {"input": items, **({"tools": TOOLS} if kind.has_tools else {})}
        before = len(counted or ())
        engine.output_before = engine.output
        engine.step, engine.output, engine.request = step, step.build_output(f"mark-{number}"), request
        was_cut, generated = number > 0 and kind.steps[number - 1].is_cut, engine.generated
        try:
            response = await model.respond(request)
        except Failed as error:
            if error.kind not in ("model_bad_request", "model_refused"):
                raise
            return outcomes + [("rejected", str(error))] * (len(kind.steps) - max(number, 1))
        body = chat.build_body(request)
        whole = engine.render(body["messages"], body.get("tools"), prompted=True)
        closed = engine.render(body["messages"], body.get("tools"), prompted=False)
        if closed == whole:
            # The template always starts the policy's turn.
            turn: Item = {"role": "assistant", "content": "word"}
            closed = engine.render([*body["messages"], turn], body.get("tools"), prompted=False)
        carrier = response["output"][-1]
        prompt = carrier[TOKEN_FIELDS[0]]
        if number == 0:
            opening = whole[: count_common(closed, whole)]
        elif carrier.get(BROKEN_FIELD):
            opening, reference.after = "", {}
            outcomes.append(("marked", max(get_warnings(model), default="")))
        else:
            suffix = tokenizer.decode(prompt[len(chain) :])
            now, engine.generated = engine.generated, generated
            same = prompt[: len(chain)] == chain and is_same(engine, whole, mark, suffix, is_cut=was_cut)
            engine.generated = now
            kept = reference.is_kept(whole, opening)
            way: Outcome = "counted" if len(counted or ()) > before else "template"
            detail = "" if same and kept else f"{'suffix' if not same else 'rewritten'}: {suffix!r} / {whole[-400:]!r}"
            outcomes.append((way if same and kept else "different", detail))
            if mark in whole:
                shown = whole[whole.rfind(mark) + len(mark) : max(count_common(closed, whole), 0)]
                reference.after[mark] = shown
        chain, mark = prompt + carrier[TOKEN_FIELDS[1]], get_mark(engine.output)
        items = [*items, *response["output"], *step.build_following(response["output"])]
    return outcomes


def get_warnings(model: Upstream) -> list[str]:
    """Return why conversations of *model* were marked."""
    return [text.rpartition("token ids: ")[2] for text in model._exact_tokens._once.warnings]


def count_outcomes(outcomes: list[tuple[Outcome, str]]) -> Counter[Outcome]:
    """Return the number of calls with each outcome."""
    return Counter(outcome for outcome, _ in outcomes)
