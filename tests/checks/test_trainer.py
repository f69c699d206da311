"""`gymsdk trainer check` passes on a sound generation server, and names the defect of each broken one."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from servers.nodes import serve_app

from gymsdk.checks.trainer import CheckResult, TrainerStack, check_trainer
from gymsdk.cli import main

CONTEXT, END, OPEN = 400, 128, 129
"""The ids below END are characters; OPEN starts a turn."""


@dataclass
class GenerationServer:
    """A server that keeps the ids of messages, as NeMo RL's does. Its flags are defects.

    Attributes:
        version: The version of the weights, of which the log-probabilities depend.
        returns_ids: Whether answers have token ids.
        keeps_ids: Whether the ids of messages are used, not those of their text.
        is_stable: Whether a token has always the same log-probability.
        overflow_status: The status for a prompt that exceeds the context.
        updates: Whether an update has an effect.
        jitters: Whether the log-probabilities of a token differ a little from call to call, as in reduced precision.
        shift: A number that is added to the log-probabilities.
        update_lies: Whether an update changes only the log-probabilities, and not what is sampled.
    """

    version: int = 0
    returns_ids: bool = True
    keeps_ids: bool = True
    is_stable: bool = True
    overflow_status: int = 400
    updates: bool = True
    jitters: bool = False
    shift: float = 0.0
    update_lies: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def build_app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self.list_models)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/update")(self.update)
        return app

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": CONTEXT}]}

    async def update(self) -> int:
        self.version += self.updates
        return self.version

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        prompt = self.build_prompt(body["messages"])
        if len(prompt) >= CONTEXT:
            message = f"This model's maximum context length is {CONTEXT} tokens."
            return JSONResponse({"error": {"message": message}}, status_code=self.overflow_status)
        ids, limit = [], body.get("max_tokens") or 4
        logprobs = []
        while len(ids) < limit and END not in ids:
            # A space may be written in two ways, so a text does not determine its ids.
            choices = [*b"abcd", 31, END] if len(ids) < 3 else [END]
            sampled, reported = (self.compute_probabilities(choices, version) for version in self.get_versions())
            ids.append(self.rng.choices(choices, sampled)[0])
            logprobs.append(math.log(reported[choices.index(ids[-1])]) + self.shift)
        noise = 1.0 if not self.is_stable else 1e-3 if self.jitters else 0.0
        logprobs = [value - noise * self.rng.random() for value in logprobs]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(map(self.spell, ids))}
        if self.returns_ids:
            message |= {
                "prompt_token_ids": prompt,
                "generation_token_ids": ids,
                "generation_log_probs": logprobs,
            }
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop" if END in ids else "length"}],
        }

    def get_versions(self) -> tuple[int, int]:
        """Return the versions of the weights that sample and that compute the log-probabilities."""
        return (0 if self.update_lies else self.version), self.version

    @staticmethod
    def compute_probabilities(choices: list[int], version: int) -> list[float]:
        weights = [(1 + (token * (version + 2)) % 7) ** 2 for token in choices]
        return [weight / sum(weights) for weight in weights]

    @staticmethod
    def spell(token: int) -> str:
        return {31: " ", END: "", OPEN: ""}.get(token, chr(token))

    def build_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if self.keeps_ids and "generation_token_ids" in message:
                ids = [*message["prompt_token_ids"], *message["generation_token_ids"]]
            else:
                ids += [OPEN, *(message["content"] or "").encode(), END]
        return [*ids, OPEN]


@asynccontextmanager
async def serve(server: GenerationServer) -> AsyncIterator[str]:
    async with serve_app(server.build_app()) as port:
        yield f"http://127.0.0.1:{port}"


async def check(server: GenerationServer) -> dict[str, CheckResult]:
    async with serve(server) as url:
        update = f"{sys.executable} -c \"import urllib.request as u; u.urlopen(u.Request('{url}/update', b''))\""
        stack = TrainerStack(f"{url}/v1", update_weights=update)
        return {result.name: result async for result in check_trainer(stack)}


def list_failed(results: dict[str, CheckResult]) -> list[str]:
    return [name for name, result in results.items() if result.outcome == "failed"]


async def test_a_sound_server_passes_every_check() -> None:
    results = await check(GenerationServer())
    assert not list_failed(results)
    # This server computes nothing for given ids, and decodes none, and the checks say so.
    skipped = {name: result.detail for name, result in results.items() if result.outcome == "skipped"}
    assert skipped == {
        "returns the text of the sampled ids": "not checked: this engine has no /detokenize; pass --tokenizer NAME",
        "computes the same log-probabilities for given ids": (
            "not checked: this engine gives no prompt log-probabilities"
        ),
        "reports raw or processed log-probabilities": "not checked: this engine takes no token prompts",
    }
    assert sorted({result.component for result in results.values()}) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "name", "reason"),
    [
        ({"returns_ids": False}, "returns token ids and log-probabilities", "returns no token ids"),
        ({"keeps_ids": False}, "keeps the sampled ids over several turns", "does not continue the tokens"),
        ({"is_stable": False}, "gives one token of one prompt one log-probability", "without penalties"),
        ({"overflow_status": 500}, "refuses a prompt that exceeds the context with 400", "has status 500"),
        ({"shift": -2.0}, "samples with the log-probabilities that it reports", "do not have the frequencies"),
        ({"updates": False}, "uses new weights after an update", "the server has the old weights"),
        ({"updates": False, "jitters": True}, "uses new weights after an update", "no more than without an update"),
        ({"update_lies": True}, "uses new weights after an update", "after the update: the first tokens"),
    ],
)
async def test_a_broken_server_fails_the_check_of_its_defect(defect: dict[str, Any], name: str, reason: str) -> None:
    results = await check(GenerationServer(**defect))
    assert name in list_failed(results)
    assert reason in results[name].detail
    # A later check may fail for the same reason, and an unrelated one must not.
    related = {
        "keeps the sampled ids over several turns": {"plays rollouts as single sequences of tokens"},
        "gives one token of one prompt one log-probability": {
            "samples with the log-probabilities that it reports",
            "uses new weights after an update",
        },
        "samples with the log-probabilities that it reports": {"uses new weights after an update"},
    }
    assert set(list_failed(results)) <= {name} | related.get(name, set())


def test_the_command_prints_the_checklist_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["trainer", "check", "--base-url", "http://127.0.0.1:9/v1"])
    assert stopped.value.code == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1. OpenAI-compatible generation server\n   failed   lists its models: ")
    assert "5. Training loop\n" in printed
    assert printed.endswith("0 passed, 2 failed, 14 skipped\n")
    with pytest.raises(SystemExit):
        main(["trainer", "check", "--base-url", "http://127.0.0.1:9/v1", "--json"])
    results = json.loads(capsys.readouterr().out)
    assert [result["outcome"] for result in results].count("skipped") == 14
