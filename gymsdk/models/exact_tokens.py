"""Continue conversations on exactly the tokens that the policy sampled, and return the ids of each call.

Chat Completions takes messages, and the engine renders and tokenizes all of them for each call. The tokens of earlier
turns then often differ from those that the policy sampled: texts have several tokenizations, and templates drop
reasoning. A trainer cannot train on such a conversation as one sequence. `ExactTokens` therefore keeps the ids. The
prompt of each call is the prompt and the generation of the call before, followed by the ids that the chat template
writes for the new messages (`gymsdk.tokens.bridge`). The ids of earlier calls come from the conversation itself
(`gymsdk.tokens.history`), so that any process can answer any call.

How the ids get to the engine depends on its token interface, `TokenInterface`. A probe finds the interface: it sends a
prompt in an encoding that the tokenizer would never choose, and checks that the engine uses exactly these ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from gymsdk import responses
from gymsdk.concurrency import CrossLoopSemaphore
from gymsdk.convert import content
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.chat import CHAT_PATH
from gymsdk.errors import Failed, UsageError
from gymsdk.jsonl import dump_json
from gymsdk.models.token_calls import (
    EngineRenderer,
    GenerateRenderer,
    LocalRenderer,
    Renderer,
    TokenCall,
    build_completion_body,
    build_no_ids_error,
    get_limit,
    run_steps,
)
from gymsdk.models.token_probe import probe
from gymsdk.models.token_settings import add_logprobs, check_prefix, get_marks
from gymsdk.once import OnceLogger
from gymsdk.responses import (
    BROKEN_FIELD,
    CONSTRAINED_FIELD,
    DIGEST_FIELD,
    SAMPLING_FIELD,
    TOKEN_FIELDS,
    TokenInterface,
)
from gymsdk.tokens.bridge import BridgeError, TemplateBridge, get_terminators
from gymsdk.tokens.chatml import THINK_START, parse_output
from gymsdk.tokens.history import TokenHistory, compute_digest, find_history, split_last_prompt
from gymsdk.tokens.tokenizer import Tokenizer, load_tokenizer
from gymsdk.types import Item, is_policy_item

log = logging.getLogger("gymsdk")

SAMPLING = MappingProxyType({"temperature": 1.0, "top_p": 1.0})
"""The sampling parameters of requests that do not set them. A server would otherwise use those of the model's files."""

ENGINE_SAMPLING = MappingProxyType({**SAMPLING, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0})
"""The same for vLLM and SGLang. The servers of trainers reject the additional parameters."""

MAX_BRIDGES = 64
"""The number of cached bridges. There is one for each list of tools and arguments of the chat template."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """The ids of a prompt; *broken* says why they do not continue the call before, empty if they do."""

    ids: list[int]
    broken: str = ""


class ExactTokens:
    """Answers the calls of one model with exact token ids.

    Args:
        name: The name of the model, for messages.
        interface: The engine's token interface; `None` finds it out at the first call.
        tokenizer: The tokenizer of the model, for engines that do not offer theirs; see `load_tokenizer`.
    """

    def __init__(self, name: str, interface: TokenInterface | None, tokenizer: Tokenizer | str | None) -> None:
        self._name = name
        self._interface = interface
        self._tokenizer = tokenizer
        self._lock = CrossLoopSemaphore(1)
        self._bridges = lru_cache(MAX_BRIDGES)(self._build_bridge)
        self._once = OnceLogger(log)

    @property
    def interface(self) -> TokenInterface | None:
        """The engine's token interface, `None` if it is not known yet."""
        return self._interface

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters of requests that do not set them."""
        return SAMPLING if self._interface in {None, "nemo-rl", "chat"} else ENGINE_SAMPLING

    async def respond(self, call: TokenCall) -> tuple[Item, TokenPrompt | None]:
        """Return a chat completion with the token fields of *call*, and the prompt if this process composed it.

        Raises:
            EngineRefusal: The engine refused the request.
            Failed: There is no valid answer.
        """
        interface = self._interface or await self.detect(call)
        check_prefix(call.body, interface)
        call = replace(call, body={**self.sampling, **call.body})
        query = {
            "vllm-generate": self._generate,
            "vllm-completions": self._complete,
            "sglang": self._chat_with_ids,
            "nemo-rl": self._chat,
            "chat": self._chat,
        }[interface]
        try:
            completion, prompt = await query(call)
            add_logprobs(completion, call.request)
        except (LookupError, TypeError, AttributeError) as error:
            message = f"{self._name}: an answer of the engine lacks expected fields: {type(error).__name__}: {error}"
            raise Failed(message, kind="model_bad_answer", retryable=True) from error
        return completion, prompt

    def finish(self, response: Item, call: TokenCall, sent: TokenPrompt | None) -> None:
        """Check the ids of *response* against those of the call before, and mark the differences for a trainer.

        Args:
            response: The Response to *call*; its last item carries the ids.
            call: The call.
            sent: The prompt that was sent, if this process composed it.

        Raises:
            Failed: The engine used another prompt than it was sent.
        """
        items = responses.get_input_items(call.request)
        carrier = response["output"][-1]
        history = find_history(items)
        prompt = carrier[TOKEN_FIELDS[0]]
        if sent is not None and prompt != sent.ids:
            raise token_fields.build_bad_tokens_error("the engine used another prompt than it was sent")
        broken = sent.broken if sent is not None else ""
        if history and not broken and prompt[: len(history.ids)] != history.ids:
            broken = "the engine rendered the conversation again, and the ids differ"
        if broken:
            carrier[BROKEN_FIELD] = True
            self._once.warn(f"{self._name}: a conversation could not continue on its token ids: {broken}")
        marks = get_marks(call.body)
        if self._interface == "chat" and call.allows_one_call:
            # Over Chat Completions, the grammar of the engine cannot be left out.
            marks[CONSTRAINED_FIELD] = True
        carrier |= marks
        if CONSTRAINED_FIELD in marks:
            self._once.warn(
                f"{self._name}: a request constrains the decoding, so its log-probabilities are not the policy's;"
                f" its items are marked {CONSTRAINED_FIELD}, and trainers leave them out of the loss"
            )
        if SAMPLING_FIELD in marks:
            settings = ", ".join(marks[SAMPLING_FIELD])
            self._once.warn(
                f"{self._name}: requests sample with {settings}, and engines report the log-probabilities without these"
                f" settings; the items are marked {SAMPLING_FIELD}"
            )
        if history is None and any(map(is_policy_item, items)) and any("status" in item for item in items):
            self._once.warn(
                f"{self._name}: a conversation came back without token ids, so its prompts are rendered again; let the"
                f" agent return output items unchanged, with {', '.join(TOKEN_FIELDS)}, or serve the model with"
                " --token-capture-dir and let the agent call /ng-rollout/ID/training-token-capture/v1"
            )
        carrier[DIGEST_FIELD] = _compute_digest([*items, *response["output"]], call)

    async def detect(self, call: TokenCall) -> TokenInterface:
        """Return the engine's token interface, after finding it out.

        Raises:
            Failed: The engine returns no token ids, or there is no answer.
        """
        await self._lock.acquire()
        try:
            if self._interface is None:
                self._interface = await probe(call, self._name, has_tokenizer=self._tokenizer is not None)
                log.info("%s: token ids through the interface %s", self._name, self._interface)
            return self._interface
        finally:
            self._lock.release()

    async def _generate(self, call: TokenCall) -> tuple[Item, TokenPrompt]:
        """Query an engine with render, generate and derender."""
        renderer = GenerateRenderer(call)
        prompt = await self._build_prompt(call, renderer)
        rendered = renderer.rendered
        parameters = dict(rendered.get("sampling_params") or {})
        if get_limit(call.body) is None:
            # The rendered maximum was computed for another prompt.
            parameters.pop("max_tokens", None)
        if not call.is_constrained:
            # vLLM adds a grammar without being asked, for strict tools and for `parallel_tool_calls: false`. Its parser
            # removes the additional calls all the same.
            parameters.pop("structured_outputs", None)
        generated = await call.post(
            "/inference/v1/generate",
            rendered
            | {"token_ids": prompt.ids, "sampling_params": parameters, "stream": False, "return_token_ids": True}
            # The engine finds out from the prompt whether reasoning has ended.
            | ({} if prompt.ids == rendered.get("token_ids") else {"reasoning_ended": None}),
        )
        choice = generated["choices"][0]
        # The parsers of the engine read the tools and the tool choice, not the messages.
        chat_request = call.body | {"messages": call.body["messages"][-1:]}
        derendered = await call.post(
            f"{CHAT_PATH}/derender",
            {
                "model": call.body.get("model"),
                "generate_response": generated | {"choices": [_drop_stop_token(choice)]},
                "chat_request": chat_request,
                "prompt_token_ids": prompt.ids,
                "prompt_tokens": len(prompt.ids),
            },
        )
        logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
        answered = derendered["choices"][0] | {"weight_versions": choice.get("weight_versions")}
        if _ends_with_stop_token(choice) and len(choice["token_ids"]) == 1:
            answered["message"] = {"role": "assistant", "content": ""}
        echoed = generated.get("prompt_token_ids")
        used = prompt.ids if echoed is None else echoed
        return _build_completion(derendered | {"choices": [answered]}, used, choice["token_ids"], logprobs), prompt

    async def _complete(self, call: TokenCall) -> tuple[Item, TokenPrompt]:
        """Query an engine with completions for token prompts."""
        if call.forces_tool:
            raise Failed(
                f"{self._name} is queried with token prompts, which cannot force a tool call; use tool_choice 'auto',"
                " or start vLLM with --enable-scale-out",
                kind="model_bad_request",
            )
        renderer = EngineRenderer(call)
        prompt = await self._build_prompt(call, renderer)
        answer = await call.post("completions", build_completion_body(call.body, prompt.ids, renderer.max_model_len))
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs") or {}
        ids = choice.get("token_ids")
        if ids is None:
            ids = token_fields.parse_ids_as_text(logprobs.get("tokens") or [])
        if ids is None:
            raise build_no_ids_error(self._name)
        bridge = self._get_bridge(call)
        opened = await run_steps(bridge.find_generation_prompt_text(), renderer)
        choice["message"] = _parse_message(choice.get("text") or "", call, opened.rstrip().endswith(THINK_START))
        if choice["message"].get("tool_calls") and choice.get("finish_reason") == "stop":
            choice["finish_reason"] = "tool_calls"
        echoed = choice.get("prompt_token_ids")
        if echoed is None and (answer.get("usage") or {}).get("prompt_tokens", len(prompt.ids)) != len(prompt.ids):
            raise token_fields.build_bad_tokens_error("the engine used another prompt than it was sent")
        used = prompt.ids if echoed is None else echoed
        return _build_completion(answer, used, ids, logprobs.get("token_logprobs") or []), prompt

    async def _chat(self, call: TokenCall) -> tuple[Item, None]:
        """Query an engine with chat completions. The messages carry the ids of earlier calls."""
        return await call.post(CHAT_PATH, call.body), None

    async def _chat_with_ids(self, call: TokenCall) -> tuple[Item, TokenPrompt]:
        """Query SGLang, which takes the ids of the prompt beside the messages."""
        renderer = LocalRenderer(self._load_tokenizer(), call)
        prompt = await self._build_prompt(call, renderer)
        return await call.post(CHAT_PATH, call.body | {"input_ids": prompt.ids}), prompt

    async def _build_prompt(self, call: TokenCall, renderer: Renderer) -> TokenPrompt:
        """Return the prompt of *call*: the ids of the call before and those of the new messages, if there are any."""
        messages = call.body["messages"]
        _check_text_only(messages)
        items = responses.get_input_items(call.request)
        history = find_history(items)
        if history is None:
            return TokenPrompt(await self._render_all(messages, renderer))
        expected = items[history.end - 1].get(DIGEST_FIELD)
        if expected is not None and expected != _compute_digest(items[: history.end], call):
            reason = "the messages, the instructions or the tools changed after the policy read them"
            return TokenPrompt(await self._render_all(messages, renderer), reason)
        try:
            suffix = await self._compute_suffix(call, history, items, renderer)
        except BridgeError as error:
            return TokenPrompt(await self._render_all(messages, renderer), str(error))
        return TokenPrompt([*history.ids, *suffix])

    async def _compute_suffix(
        self, call: TokenCall, history: TokenHistory, items: list[Item], renderer: Renderer
    ) -> list[int]:
        """Return the ids of the messages after the last call, by placeholder, else by counting turns."""
        new = call.build_new_messages(items[history.end :])
        messages = call.body["messages"]
        conversation = messages[: len(messages) - len(new)]
        if [*conversation, *new] != messages or conversation[-1].get("role") != "assistant":
            raise BridgeError("the messages after the policy's turn change when they follow the conversation")
        bridge, parts = self._get_bridge(call), split_last_prompt(items)
        try:
            return await run_steps(
                bridge.compute_suffix(history.generated, new, conversation=conversation, parts=parts), renderer
            )
        except BridgeError as error:
            try:
                return await run_steps(bridge.count_suffix(history.generated, conversation, new, parts=parts), renderer)
            except BridgeError:
                raise error from None

    async def _render_all(self, messages: list[Item], renderer: Renderer) -> list[int]:
        try:
            return await renderer.render(messages, add_generation_prompt=True)
        except UsageError as error:
            raise Failed(str(error), kind="model_bad_request") from error

    def _get_bridge(self, call: TokenCall) -> TemplateBridge:
        settings = [call.body.get("tools"), call.body.get("chat_template"), call.template_variables]
        return self._bridges(dump_json(settings))

    def _build_bridge(self, _key: bytes) -> TemplateBridge:
        return TemplateBridge(get_terminators(self._load_tokenizer()) if self._interface == "sglang" else ())

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Failed(
                f"{self._name}: SGLang does not render messages; name the model's tokenizer with --tokenizer",
                kind="model_misconfigured",
            )
        return load_tokenizer(self._tokenizer)


def _check_text_only(messages: list[Item]) -> None:
    """Raise `Failed` if a message has an image or another part that is not text."""
    for message in messages:
        content_parts = message.get("content")
        kinds = {part.get("type") for part in content_parts} if isinstance(content_parts, list) else set()
        if other := kinds - {"text", "refusal"}:
            raise Failed(
                f"a message has a part of type {min(map(str, other))!r}, and token ids are kept for text only;"
                " leave out --token-ids",
                kind="model_bad_request",
            )


def _drop_stop_token(choice: Item) -> Item:
    """Return the *choice* of a generate response without the token at which the engine stopped.

    The engine's chat completions leave it out of the text. `derender` writes the text of all ids that it is given,
    special tokens included, if the engine has a parser for tools or reasoning.
    """
    ids = choice["token_ids"]
    # `derender` refuses an empty list.
    kept = ids[:-1] if _ends_with_stop_token(choice) and len(ids) > 1 else ids
    return choice | {"token_ids": kept, "logprobs": None}


def _ends_with_stop_token(choice: Item) -> bool:
    """Whether generation ended at a token: `stop_reason` is `None` for the end token, an id, or a stop string."""
    return choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str)


def _build_completion(answer: Item, prompt: list[int], ids: list[int], logprobs: list[float]) -> Item:
    """Return a chat completion with the token fields in its message."""
    choice = answer["choices"][0]
    fields: Item = dict(zip(TOKEN_FIELDS, (prompt, ids, logprobs), strict=True))
    if choice.get(token_fields.ROUTED_EXPERTS) is not None:
        fields[token_fields.ROUTED_EXPERTS] = choice[token_fields.ROUTED_EXPERTS]
    message = choice["message"] | fields
    kept = {key: value for key, value in choice.items() if key not in {"token_ids", "logprobs", "prompt_token_ids"}}
    return answer | {"choices": [kept | {"message": message}]}


def _parse_message(text: str, call: TokenCall, thinking: bool) -> Item:
    """Return the chat message of a generated *text*, which starts with reasoning if *thinking*."""
    if not call.body.get("tools") or call.body.get("tool_choice") == "none":
        reasoning, rest = content.split_think_blocks(f"{THINK_START}{text}" if thinking else text)
        return {"role": "assistant", "content": rest, "reasoning_content": "\n".join(reasoning) or None}
    parsed = parse_output(text, thinking=thinking)
    calls = parsed.calls[:1] if call.body.get("parallel_tool_calls") is False else parsed.calls
    message: Item = {"role": "assistant", "content": parsed.text}
    message["reasoning_content"] = "\n".join(parsed.reasoning) or None
    if calls:
        message["tool_calls"] = [
            {
                "id": responses.generate_id("call"),
                "type": "function",
                "function": {"name": parsed_call.name, "arguments": parsed_call.arguments},
            }
            for parsed_call in calls
        ]
    return message


def _compute_digest(items: list[Item], call: TokenCall) -> str:
    return compute_digest(items, call.request.get("instructions"), call.body.get("tools"))
