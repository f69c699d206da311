"""The `token_id_capture` of NeMo Gym's configuration files."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from migration.test_judge import ALWAYS, ROW
from migration.workspace import Workspace, fetch_config

CONFIG = """\
token_id_capture: {{enabled: true, dir: tokens, max_mask_fraction: 0.5, delta_records: true}}
policy_model:
  responses_api_models:
    vllm_model: {{base_url: {url}, api_key: none, model: policy, return_token_id_information: true}}
math:
  resources_servers:
    math_with_judge:
      entrypoint: app.py
      domain: math
      judge_model_server: {{type: responses_api_models, name: policy_model}}
      judge_responses_create_params: {{input: []}}
      should_use_judge: true
math_agent:
  responses_api_agents:
    simple_agent:
      resources_server: {{type: resources_servers, name: math}}
      model_server: {{type: responses_api_models, name: policy_model}}
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """Yield a folder with a configuration in which the policy judges its own answers."""
    workspace = Workspace(tmp_path_factory.mktemp("captured"))
    workspace.write("always.jsonl", ALWAYS)
    with workspace.serve("gymsdk policy serve script:always.jsonl --port 0") as policy:
        workspace.write("math.yaml", CONFIG.format(url=policy.url("policy")))
        yield workspace


@pytest.mark.parametrize("flag", ["", pytest.param(" --separate", marks=pytest.mark.slow)])
def test_the_calls_of_the_policy_are_captured_and_not_those_of_the_judge(workspace: Workspace, flag: str) -> None:
    rollout = f"r{len(flag)}"
    with workspace.serve(workspace.with_head_port(f"gymsdk serve --config math.yaml{flag}")) as servers:
        row = {key: ROW[key] for key in ROW if key != "response"}
        prefix = f"{servers.url('math_agent')}/ng-rollout/{rollout}/training-token-capture"
        line = httpx.post(f"{prefix}/run", json=row, timeout=60).json()
        config = fetch_config(workspace.head)
    assert (line["reward"], len(line["judge_evaluations"])) == (1.0, 2)
    folder = workspace.folder / "tokens"
    [entry] = map(json.loads, (folder / f"{rollout}.tokens.jsonl").read_text().splitlines())
    assert entry["prompt_token_ids"] == line["response"]["output"][-1]["prompt_token_ids"]
    assert config["token_id_capture"] == {
        "enabled": True,
        "dir": str(folder),
        "all_agents": False,
        "rebuild_response": True,
        "max_mask_fraction": 0.5,
        "mask_fraction_min_samples": 50,
    }


def test_a_model_without_token_ids_is_refused_at_the_start(workspace: Workspace) -> None:
    workspace.write(
        "plain.yaml", (workspace.folder / "math.yaml").read_text().replace("_information: true", "_information: false")
    )
    completed = workspace.run("gymsdk serve --config plain.yaml")
    assert completed.code == 2
    assert "token ids can be captured only if the model returns them; add --token-ids" in completed.err
