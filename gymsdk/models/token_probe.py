"""Find out how an engine takes and returns token ids."""

from __future__ import annotations

import logging
from typing import Any

from gymsdk.convert import chat
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.chat import CHAT_PATH
from gymsdk.models.token_calls import TokenCall, build_completion_body, build_no_ids_error
from gymsdk.models.token_scores import post_or_none as ask
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.types import Item

log = logging.getLogger("gymsdk")


async def probe(call: TokenCall, name: str, *, has_tokenizer: bool = False) -> TokenInterface:
    """Find out how an engine takes and returns token ids.

    The probe sends a short conversation in an encoding that the tokenizer would not choose, and checks that the engine
    uses exactly these ids.

    Args:
        call: A call of the model; the probe sends its own messages with the call's model and sampling parameters.
        name: The name of the model, for messages.
        has_tokenizer: Whether this process has the model's tokenizer.

    Raises:
        EngineRefusal: The engine refuses requests without fields for token ids, too.
        Failed: The engine returns no token ids, or there is no answer.
    """
    sampling = {key: value for key, value in call.body.items() if key in {"model", "temperature", "top_p"}}
    base = sampling | dict(token_fields.TOKEN_REQUEST_FIELDS) | {"max_tokens": 1}
    messages = [{"role": "user", "content": "Say yes."}]
    split = await _find_unusual_ids(call, messages)
    if split is not None:
        for interface, probe_interface in (
            ("vllm-generate", _probe_generate),
            ("vllm-completions", _probe_completions),
        ):
            if await probe_interface(call, base, messages, split):
                return interface  # type: ignore[return-value]  # the names are those of the literal
    completion = await ask(call, CHAT_PATH, base | {"messages": messages})
    if completion is None:
        # The engine may refuse the fields for token ids, or any request, such as one with a wrong address or key.
        await call.post(CHAT_PATH, sampling | {"messages": messages, "max_tokens": 1})
    fields = chat.read_token_fields(completion, strict=False) if _is_completion(completion) else {}
    if not fields:
        raise build_no_ids_error(name)
    if "response_token_ids" in completion["choices"][0] and has_tokenizer:
        return "sglang"
    # A server that keeps the ids of messages uses these ones, although the text of the message is another.
    turn = {"role": "assistant", "content": "no"} | dict(
        zip(
            TOKEN_FIELDS,
            (fields[TOKEN_FIELDS[0]], fields[TOKEN_FIELDS[1]] * 2, fields[TOKEN_FIELDS[2]] * 2),
            strict=True,
        )
    )
    second = await ask(call, CHAT_PATH, base | {"messages": [*messages, turn, *messages]})
    again = chat.read_token_fields(second, strict=False) if _is_completion(second) else {}
    kept = [*turn[TOKEN_FIELDS[0]], *turn[TOKEN_FIELDS[1]]]
    if again and again[TOKEN_FIELDS[0]][: len(kept)] == kept:
        return "nemo-rl"
    log.warning(
        "%s returns token ids, but renders the conversation again for each call; from the second call on, most prompts"
        " will not continue the ids of the call before, and are marked %s; serve the model with vLLM 0.10 or newer",
        name,
        BROKEN_FIELD,
    )
    return "chat"


async def _find_unusual_ids(call: TokenCall, messages: list[Item]) -> list[int] | None:
    """Return a prompt that ends with a word split into letters; `None` if the engine has no `/tokenize`."""
    model = {"model": call.body.get("model")}
    rendered = await ask(call, "/tokenize", model | {"messages": messages})
    letters = [
        await ask(call, "/tokenize", model | {"prompt": letter, "add_special_tokens": False}) for letter in "then"
    ]
    answers = [rendered, *letters]
    if not all(isinstance(answer, dict) and isinstance(answer.get("tokens"), list) for answer in answers):
        return None
    return [token for answer in answers for token in answer["tokens"]]


async def _probe_generate(call: TokenCall, base: Item, messages: list[Item], ids: list[int]) -> bool:
    rendered = await ask(call, f"{CHAT_PATH}/render", base | {"messages": messages})
    if not isinstance(rendered, dict) or not isinstance(rendered.get("token_ids"), list):
        return False
    generated = await ask(call, "/inference/v1/generate", rendered | {"token_ids": ids, "return_token_ids": True})
    if not _has_generated(generated, "token_ids"):
        return False
    derendered = await ask(
        call,
        f"{CHAT_PATH}/derender",
        {"generate_response": generated, "prompt_token_ids": ids, "chat_request": base | {"messages": messages}},
    )
    return generated.get("prompt_token_ids") in (None, ids) and _is_completion(derendered)


async def _probe_completions(call: TokenCall, base: Item, messages: list[Item], ids: list[int]) -> bool:
    completion = await ask(call, "completions", build_completion_body(base | {"messages": messages}, ids, None))
    if not _has_generated(completion, "token_ids"):
        choice = completion["choices"][0] if isinstance(completion, dict) and completion.get("choices") else {}
        spelled = (choice.get("logprobs") or {}).get("tokens") or [""]
        if not str(spelled[0]).startswith(token_fields.TOKEN_ID_PREFIX):
            return False
    return completion["choices"][0].get("prompt_token_ids") in (None, ids)


def _has_generated(answer: Any, key: str) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("choices"), list)
        and bool(answer["choices"])
        and isinstance(answer["choices"][0].get(key), list)
        and answer["choices"][0].get("logprobs") is not None
    )


def _is_completion(answer: Any) -> bool:
    return (
        isinstance(answer, dict)
        and bool(answer.get("choices"))
        and isinstance(answer["choices"][0].get("message"), dict)
    )
