"""A generation server with an OpenAI-compatible API, token ids, log-probabilities and weight updates.

It keeps the contract of NeMo RL's generation server: an assistant message that carries `prompt_token_ids` and
`generation_token_ids` is continued on exactly these tokens, and the answer carries the same fields.
"""

from __future__ import annotations

import argparse
import io
import time
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from models import FolderModel
from policy import DigitModel

from gymsdk.edge.app import HostCheck
from gymsdk.http.pages import LOOPBACK_NAMES
from gymsdk.tokens.chatml import parse_output

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def build_prompt(model: DigitModel | FolderModel, messages: list[dict[str, Any]]) -> list[int]:
    """Return the prompt of a conversation; turns that carry their ids are not tokenized again."""
    ids: list[int] = []
    for message in messages:
        if message.get(TOKEN_FIELDS[0]):
            ids = [*message[TOKEN_FIELDS[0]], *message[TOKEN_FIELDS[1]]]
            # The template ends each turn; a reply that reached the token limit has no end of its own.
            ids += [] if ids[-1] == model.end else [model.end]
        else:
            ids += model.encode(message)
    return [*ids, *model.prompt_end]


def build_message(text: str) -> dict[str, Any]:
    """Return the message with the text and the tool calls of a turn."""
    parsed = parse_output(text)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{time.monotonic_ns()}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message


def build_app(model: DigitModel | FolderModel) -> FastAPI:
    """Return the server of a model."""
    app = FastAPI()
    # A web page in a browser of this machine must not use or change the policy.
    app.add_middleware(HostCheck, allowed=LOOPBACK_NAMES)
    version = 0

    @torch.inference_mode()
    def generate(prompt: list[int], limit: int, temperature: float, seed: int | None) -> tuple[list[int], list[float]]:
        rng = torch.Generator()
        if seed is None:
            rng.seed()
        else:
            # The turns of a rollout have the same seed, and different samples.
            rng.manual_seed(hash((seed, len(prompt), version)) % 2**31)
        ids, logprobs = list[int](), list[float]()
        scoring = model.score(prompt)
        scores = next(scoring)
        while len(ids) < limit and ids[-1:] != [model.end]:
            ids.append(int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=rng)))
            logprobs.append(float(scores[ids[-1]]))
            if len(ids) < limit and ids[-1] != model.end:
                scores = scoring.send(ids[-1])
        return ids, logprobs

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": model.context}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        prompt = build_prompt(model, body["messages"])
        wanted = body.get("max_tokens") or body.get("max_completion_tokens") or model.context
        limit = min(wanted, model.context - len(prompt))
        if limit < 1:
            raise HTTPException(400, f"the maximum context length is {model.context} tokens")
        ids, logprobs = generate(prompt, limit, body.get("temperature") or 1.0, body.get("seed"))
        message = build_message(model.decode(ids)) | dict(zip(TOKEN_FIELDS, (prompt, ids, logprobs), strict=True))
        return {
            "id": f"chatcmpl-{time.monotonic_ns()}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "weight_version": version,
            "choices": [
                {"index": 0, "message": message, "finish_reason": "stop" if ids[-1] == model.end else "length"}
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }

    @app.post("/update_weights")
    async def update_weights(request: Request) -> dict[str, int]:
        nonlocal version
        model.policy.load_state_dict(torch.load(io.BytesIO(await request.body()), weights_only=True))
        version += 1
        return {"weight_version": version}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the random weights")
    parser.add_argument("--model", help="serve the model of transformers in this folder, instead of the one for digits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = DigitModel(options.seed) if options.model is None else FolderModel(options.model)
    uvicorn.run(build_app(model), port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
