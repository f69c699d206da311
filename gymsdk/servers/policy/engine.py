"""An engine: a policy asked in the words of any API, its room bounded, its tokens told where they are asked for."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from gymsdk import responses, wire
from gymsdk.convert.chat import LOGPROBS
from gymsdk.convert.faces import chat
from gymsdk.convert.faces.face import Face, Malformed
from gymsdk.convert.tokens import wanted
from gymsdk.errors import UsageError
from gymsdk.transcript import Item
from gymsdk.types import Model

from . import generations, prompts, taken
from .faults import Fate, Faults
from .generations import Generation
from .prompts import Prompt

Reasoning: TypeAlias = Literal["field", "tags", "none"]
"""How a chat is told thoughts: in fields of their own, as `<think>` in the text, or not at all."""

ASKING: dict[Reasoning, Item] = {
    "field": {},
    "tags": {"separate_reasoning": False},
    "none": {"include_reasoning": False},
}
"""What of a chat body asks for thoughts in that form."""

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


class BadRequest(Malformed):
    """A request of its API that this engine does not take."""


class Engine:
    """The engine that asks *model*, known as *name*; *bundles* tells a chat the tokens as NeMo RL's server does."""

    def __init__(
        self, model: Model, *, name: str, faults: Faults, reasoning: Reasoning = "field", bundles: bool = False
    ) -> None:
        self.name = name
        self.faults = faults
        self._model = model
        self._asking = ASKING[reasoning]
        self._bundles = bundles
        # What a scripted policy counts by itself leaves out what gives a conversation its structure.
        self._counts = str(getattr(model, "name", "")).startswith("scripted/")

    async def answer(self, face: Face, body: Item, fate: Fate) -> Item:
        """Give the answer to a *body* of the API of *face*; raises `Malformed` or `Failed`."""
        request = face.parse_request(body)
        asked = body | self._asking if self._asking else body
        prompt, used = shown(face, body, request)
        taken.check(request, where="input" if "input" in body else "messages")
        self._takes_tools(request)
        room = self._room(request, used)
        response = await responses.told(self._model, request, episode=None)
        thoughts = face is not chat.FACE or asked.get("include_reasoning") is not False
        output = self._let(response["output"], request, fate)
        said = generations.generation(
            output, turn=prompt.turn(), room=room, thoughts=thoughts, parsed=not self.faults.unparsed
        )
        return self._told(face, asked, request, response | {"model": self.name}, prompt, said, used)

    def _told(
        self, face: Face, asked: Item, request: Item, response: Item, prompt: Prompt, said: Generation, used: int
    ) -> Item:
        response["output"] = said.output
        if not said.whole:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        ids = _wants_ids(asked)
        if self._counts or ids or not said.whole:
            response["usage"] = wire.usage(used, said.size)
        if not ids:
            if LOGPROBS in (request.get("include") or ()):
                response["output"] = generations.likely(said, top=bool(request.get("top_logprobs")))
            return face.build_answer(response, asked)
        if face is chat.FACE:
            return self._with_tokens(face.build_answer(response, asked), asked, prompt, said)
        if asked.get("return_token_ids") and said.output:
            response["output"] = [*said.output[:-1], said.output[-1] | _bundle(prompt, said)]
        return face.build_answer(response, asked)

    def _with_tokens(self, answer: Item, asked: Item, prompt: Prompt, said: Generation) -> Item:
        """Give a chat's *answer* with the tokens that were *asked* for."""
        choice, ids = answer["choices"][0], said.ids()
        if asked.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = prompt.ids(), ids
        if asked.get("logprobs"):
            as_ids, top = bool(asked.get("return_tokens_as_token_ids")), bool(asked.get("top_logprobs"))
            choice["logprobs"] = {"content": generations.logprobs(ids, as_ids=as_ids, top=top)}
        if self._bundles and wanted(asked):
            choice["message"] |= _bundle(prompt, said)
        return answer

    def _let(self, output: list[Item], request: Item, fate: Fate) -> list[Item]:
        """The *output* as this engine lets it be said."""
        if request.get("parallel_tool_calls") is False:
            output = generations.alone(output)
        if fate.malformed:
            output = generations.malformed(output)
        return generations.unparsed(output) if self.faults.unparsed else output

    def _takes_tools(self, request: Item) -> None:
        if self.faults.refuses_tools and request.get("tools") and request.get("tool_choice") in (None, "auto"):
            raise BadRequest(NO_PARSER)

    def _room(self, request: Item, used: int) -> int | None:
        """How many tokens the answer may have; raises `BadRequest` where a prompt of *used* tokens leaves none."""
        limit, context = _limit(request), self.faults.context
        if context is None:
            return limit
        length = f"This model's maximum context length is {context} tokens"
        if used >= context:
            raise BadRequest(
                f"{length}. However, your request has {used} input tokens."
                " Please reduce the length of the input messages.",
                "input_tokens",
            )
        if limit is not None and used + limit > context:
            raise BadRequest(
                f"'max_tokens' or 'max_completion_tokens' is too large: {limit}. {length} and your request has"
                f" {used} input tokens ({limit} > {context} - {used}).",
                "max_tokens",
            )
        return context - used if limit is None else limit


def shown(face: Face, body: Item, request: Item) -> tuple[Prompt, int]:
    """Give what a policy is shown for a *body* of the API of *face*, which is the *request*, and how many tokens it is.

    Raises `BadRequest` where it cannot be written.
    """
    try:
        prompt = prompts.of_chat(body) if face is chat.FACE else prompts.of_request(request)
        return prompt, prompt.size()
    except (UsageError, LookupError, TypeError, AttributeError) as error:
        raise BadRequest(f"the conversation cannot be written for the policy: {error}") from error


def _limit(request: Item) -> int | None:
    limit: Any = request.get("max_output_tokens")
    if limit is None:
        return None
    if not isinstance(limit, int) or limit < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    return limit


def _wants_ids(asked: Item) -> bool:
    return bool(asked.get("return_token_ids") or asked.get("logprobs"))


def _bundle(prompt: Prompt, said: Generation) -> Item:
    ids = said.ids()
    chances = [generations.chance(token, place) for place, token in enumerate(ids)]
    return dict(zip(wire.TOKENS, (prompt.ids(), ids, chances), strict=True))
