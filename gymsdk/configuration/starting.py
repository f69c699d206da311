"""A starting file: the configuration that serves one environment, to be changed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

TEXT = """\
# {name}, its agent and who plays it. Serve them with: gymsdk serve --config FILE
# Where every setting comes from: gymsdk config --config FILE

head_server:
  host: 127.0.0.1
  port: 11000

# Beyond this machine, with a token that clients must show:
# default_host: 0.0.0.0
# token_file: token.txt

{name}:
  resources_servers:
    {name}:
      entrypoint: app.py
      # host: 127.0.0.1
      # port: 11001  # any free one, if not given
{settings}
{name}_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server:
        type: resources_servers
        name: {name}
      model_server:
        type: responses_api_models
        name: policy_model
      max_steps: 32
      # Rows that can be rolled out by name:
      # datasets:
      #   - name: example
      #     type: example
      #     jsonl_fpath: rows.jsonl

policy_model:
  responses_api_models:
    gymsdk_model:
      model: scripted/oracle  # knows the answers
    # A vLLM server, in place of the two lines above:
    # vllm_model:
    #   entrypoint: app.py
    #   base_url: http://127.0.0.1:8000/v1  # or policy_base_url in env.yaml
    #   api_key: ${{oc.env:VLLM_API_KEY,none}}
    #   model: NAME
    #   return_token_id_information: false  # true for training
"""


def text(name: str, settings: Mapping[str, Any]) -> str:
    """Give a file that serves the environment *name*; its *settings* stand there as comments, with their defaults."""
    head = ["      # The environment's own settings, and their defaults:"] if settings else []
    lines = [f"      # {key}: {json.dumps(value, ensure_ascii=False, default=str)}" for key, value in settings.items()]
    return TEXT.format(name=name, settings="".join(f"{line}\n" for line in [*head, *lines]))
