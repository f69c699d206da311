"""Turns that were decoded under a constraint are left out of the loss, wherever a trainer reads them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gymsdk import load
from gymsdk.config.model import Deployment, ModelServerConfig
from gymsdk.deploy.process import serve as serve_environments
from gymsdk.http import client as http
from gymsdk.line import StoredRollout
from gymsdk.responses import CONSTRAINED_FIELD, TOKEN_FIELDS
from gymsdk.rollouts.export import CONSTRAINED, ExportReport, export_dpo, export_sft
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.remote import RemotePlayer, fetch_servers
from gymsdk.rollouts.settings import Selection
from gymsdk.testing import build_app, serve
from gymsdk.tokens.history import mask_untrainable
from gymsdk.trl.samples import build_sample
from gymsdk.types import Item

from .conversations import Turn, TurnPolicy

SCHEMA = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Please look in there."}]},
    "expected_answer": "1",
    "instance_config": {"repository": "x"},
}


def build_item(prompt: list[int], generated: list[int], **fields: Any) -> Item:
    tokens = dict(zip(TOKEN_FIELDS, (prompt, generated, [-0.5] * len(generated)), strict=True))
    return {"type": "message", "role": "assistant", "content": "a"} | tokens | fields


PLAIN = build_item([1], [2, 3])
MARKED = build_item([1, 2, 3, 4], [5], **{CONSTRAINED_FIELD: True})
LAST = build_item([1, 2, 3, 4, 5, 6], [7])


def test_a_sample_for_trl_counts_a_constrained_turn_as_the_environments() -> None:
    sample = build_sample([PLAIN, MARKED, LAST])
    assert sample.ids == [1, 2, 3, 4, 5, 6, 7]
    assert sample.env_mask == [1, 1, 0, 0, 0, 1]
    assert sample.logprobs == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]
    with pytest.raises(ValueError, match="each turn was decoded under a constraint"):
        build_sample([build_item([1], [2], **{CONSTRAINED_FIELD: True})])


@pytest.mark.parametrize("write", [export_sft, export_dpo])
def test_no_training_file_has_a_constrained_turn(write: Any) -> None:
    details = {"responses_create_params": {"input": "What?"}, "gymsdk": {"environment": "e", "ended": "done"}}
    lines: list[Item] = [
        details
        | {"response": {"output": [item]}, "reward": 1.0 - repeat, "_ng_task_index": 0, "_ng_rollout_index": repeat}
        for repeat, item in enumerate([MARKED, PLAIN | {"content": "b"}])
    ]
    report = ExportReport()
    assert [*write(map(StoredRollout, lines), Selection(), report)] == []
    assert report.left_out[CONSTRAINED] == 1


def test_a_row_keeps_its_own_settings_when_it_is_masked() -> None:
    line = {"response": {"output": [PLAIN]}, "reward": 1.0, "instance_config": {"repository": "x"}}
    assert mask_untrainable(line) is line
    masked = mask_untrainable(line | {"response": {"output": [PLAIN, MARKED]}})
    assert masked["instance_config"] == {"repository": "x", "mask_sample": True}
    assert masked["response"]["output"] == [PLAIN, MARKED]


@pytest.mark.parametrize("is_constrained", [True, False])
async def test_a_rollout_with_a_constrained_turn_is_masked_by_the_servers(is_constrained: bool) -> None:
    row = ROW | {
        "responses_create_params": ROW["responses_create_params"]
        | ({"text": {"format": SCHEMA}} if is_constrained else {})
    }
    policy = TurnPolicy([Turn("", "it is in there", (), ("", "", ""))] * 9)
    async with serve(build_app(policy)) as url:
        model = ModelServerConfig(name=f"vllm/policy@{url}", options={"tokens": True})
        async with serve_environments([load("math")], deployment=Deployment(model=model)) as running:
            async with httpx.AsyncClient(timeout=60) as client:
                answer = await client.post(f"{running.urls['math_simple_agent']}/run", json=row)
            result = answer.json()
            servers = await fetch_servers(running.head_url)
            job = Job("math", 0, 0, row | {"agent_ref": {"type": "responses_api_agents", "name": "math_simple_agent"}})
            played = await RemotePlayer(servers.build_agent_client(60.0))(job)
    await http.aclose()
    assert result["response"]["output"][-1].get(CONSTRAINED_FIELD, False) is is_constrained
    assert result["instance_config"] == {"repository": "x"} | ({"mask_sample": True} if is_constrained else {})
    assert result["reward"] == played.rollout.reward == 0.0
    assert played.rollout.response["output"][-1].get(CONSTRAINED_FIELD, False) is is_constrained
