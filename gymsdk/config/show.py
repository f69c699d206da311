"""A starting file: the configuration that serves one environment, to be changed by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gymsdk.config.model import MODELS, Deployment, ModelServerConfig, ServerConfig, Setting
from gymsdk.config.redaction import is_redacted, is_secret
from gymsdk.config.servers import get_endpoint_keys
from gymsdk.config.yaml import DEFAULT_PLACE, KeyPath, Node, Place, format_key_path, redact_secrets, to_plain
from gymsdk.http.tls import redact_url

REDACTED = "***"
COMMENT_COLUMN = 48
"""The column where the place of a setting stands, if its value leaves room."""


def list_settings(root: Node, deployment: Deployment, secrets: set[str], veils: set[KeyPath]) -> tuple[Setting, ...]:
    """Give everything in *root*, and what is not there but counts, as it may be shown: nothing of *veils* is."""
    # What another setting has from there is the same.
    secrets = secrets | {str(node.value) for trail, node in root.walk() if node.value and is_redacted(trail, veils)}
    written = {trail: (value, place) for trail, value, place in _leaves(root, ())}
    for block in deployment.get_servers(MODELS):
        written |= dict(_endpoint(root, block))
    ours = {trail: (value, DEFAULT_PLACE) for trail, value in _defaults(deployment) if root.get(*trail) is None}
    found = sorted((written | ours).items(), key=lambda each: _order(each[0], deployment))
    return tuple(
        Setting(
            trail=trail, value=REDACTED if is_redacted(trail, veils) else _shown(trail, value, secrets, veils), place=at
        )
        for trail, (value, at) in found
    )


def redact_fields(deployment: Deployment, fields: Mapping[str, Collection[str]]) -> Deployment:
    """Give *deployment* with these *fields* of servers hidden too, by the servers' names."""
    told = [
        each.model_copy(update={"value": REDACTED}) if {*each.trail[1:]} & {*fields.get(each.trail[0], ())} else each
        for each in deployment.settings
    ]
    return deployment.model_copy(update={"settings": tuple(told)})


def format_yaml_lines(deployment: Deployment) -> Iterator[str]:
    """Yield the settings as YAML, each with its place in a comment."""
    above: KeyPath = ()
    for each in deployment.settings:
        shared = _shared(above, each.trail)
        for depth in range(shared, len(each.trail) - 1):
            yield f"{'  ' * depth}{each.trail[depth]}:"
        line = f"{'  ' * (len(each.trail) - 1)}{each.trail[-1]}: {_written(each.value)}"
        yield f"{line:<{COMMENT_COLUMN}}  # {each.place}"
        above = each.trail


def dump_settings(deployment: Deployment) -> dict[str, Any]:
    """Give the settings, and what is ignored, as JSON."""
    found = {
        format_key_path(each.trail): {"value": each.value, "from": str(each.place)} for each in deployment.settings
    }
    return {"settings": found, "ignored": list(deployment.ignored), "notes": list(deployment.notes)}


def _leaves(node: Node, trail: KeyPath) -> Iterator[tuple[KeyPath, Any, Place]]:
    for key, each in node.children.items():
        way = (*trail, key)
        if each.is_mapping and each.children:
            yield from _leaves(each, way)
        elif each.value is not None:
            yield way, to_plain(each), each.place


def _defaults(deployment: Deployment) -> Iterator[tuple[KeyPath, Any]]:
    yield ("head_server", "host"), deployment.head.host
    yield ("head_server", "port"), deployment.head.port
    yield ("default_host",), deployment.default_host
    yield ("insecure",), deployment.insecure
    yield ("log_level",), deployment.logs.level
    yield ("log_format",), deployment.logs.format
    yield ("model_endpoint_readiness_timeout_seconds",), deployment.readiness
    for block in deployment.servers:
        trail = (block.name, block.kind, block.implementation)
        yield (*trail, "host"), block.host or deployment.default_host
        yield (*trail, "port"), 0
        for key, name in block.refers.items():
            yield (*trail, key, "name"), name


def _endpoint(root: Node, block: ServerConfig) -> Iterator[tuple[KeyPath, tuple[Any, Place]]]:
    """Yield the addresses and the model a model server really has, its own or the policy's."""
    if not isinstance(block.part, ModelServerConfig) or block.implementation == "gymsdk_model":
        return
    trail = (block.name, block.kind, block.implementation)
    its_url, its_key, its_model = get_endpoint_keys(block.implementation)
    urls = list(block.part.options.get("base_url", ()))
    name = block.part.name.partition("/")[2]
    told = [
        (its_url, "policy_base_url", urls if len(urls) > 1 else "".join(urls)),
        (its_model, "policy_model_name", name),
    ]
    if block.part.options.get("api_key"):
        told.append((its_key, "policy_api_key", REDACTED))
    for key, setting, value in told:
        own = root.get(*trail, key)
        if value:
            yield (*trail, key), (value, own.place if own and own.value else root.place_of((setting,)))


def _order(trail: KeyPath, deployment: Deployment) -> tuple[int, KeyPath]:
    """Give the head first, then single settings, then the servers in their order."""
    names = [block.name for block in deployment.servers]
    if trail[0] in names:
        return 2 + names.index(trail[0]), trail[1:3]
    return (0 if trail[0] == "head_server" else 1), trail[:1]


def _shown(trail: KeyPath, value: Any, secrets: set[str], veils: set[KeyPath]) -> Any:
    if (is_secret(trail) or is_redacted(trail, veils)) and value not in ("", None) and not isinstance(value, bool):
        return REDACTED
    if isinstance(value, dict):
        return {key: _shown((*trail, key), each, secrets, veils) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown((*trail, str(at)), each, secrets, veils) for at, each in enumerate(value)]
    return redact_url(redact_secrets(value, secrets)) if isinstance(value, str) else value


def _shared(one: KeyPath, other: KeyPath) -> int:
    """Give how many keys both begin with, their last ones left out."""
    shared = 0
    for first, second in zip(one[:-1], other[:-1], strict=False):
        if first != second:
            break
        shared += 1
    return shared


def _written(value: Any) -> str:
    """Give *value* as YAML in one line."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./-]*", value):
        return (
            value
            if value.lower() not in {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
            else f'"{value}"'
        )
    return json.dumps(value, ensure_ascii=False, default=str)


STARTER_TEMPLATE = """\
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


def build_starter_file(name: str, settings: Mapping[str, Any]) -> str:
    """Give a file that serves the environment *name*; its *settings* stand there as comments, with their defaults."""
    head = ["      # The environment's own settings, and their defaults:"] if settings else []
    lines = [f"      # {key}: {json.dumps(value, ensure_ascii=False, default=str)}" for key, value in settings.items()]
    return STARTER_TEMPLATE.format(name=name, settings="".join(f"{line}\n" for line in [*head, *lines]))
