"""Built-in files: what NeMo Gym's own configuration files say, for entries of `config_paths` that are not on disk."""

from __future__ import annotations

import re

from gymsdk.configuration.kinds import AGENTS, ENVIRONMENTS, IMPLEMENTATIONS, MODELS, POLICY, REFUSED, RESOURCES
from gymsdk.errors import BadConfig, suggestion

SHAPE = re.compile(
    rf"(?:.*/)?(?P<kind>{RESOURCES}|{AGENTS}|{MODELS}|{ENVIRONMENTS})/(?P<name>[^/]+)/(?:configs/)?(?P<file>[^/]+)\.ya?ml"
)
"""An entry that names one of NeMo Gym's files, wherever its checkout would be."""

SETTINGS = {"openai_model": ("openai_base_url", "openai_api_key", "openai_model")}
ENDPOINT = ("base_url", "api_key", "model")
TRAINING = "_for_training"

UNJUDGED = {name: (name, "dapo17k", "bytedtsinghua_dapo17k") for name in ("library_judge_math", "math_with_judge")}
"""The files of resources servers that can have a judge which have it switched off: the built-in text has none."""

RESOURCES_TEXT = """\
{name}:
  resources_servers:
    {name}:
      entrypoint: app.py
{name}_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: {name}}}
      model_server: {{type: responses_api_models, name: policy_model}}
"""
SERVER_TEXT = """\
{name}:
  {kind}:
    {name}:
      entrypoint: app.py
"""
MODEL_TEXT = """\
{policy}:
  responses_api_models:
    {name}:
      entrypoint: app.py
      {base_url}: ${{policy_base_url}}
      {api_key}: ${{policy_api_key}}
      {model}: ${{policy_model_name}}
"""


def text(entry: str) -> str | None:
    """Give what the file *entry* of NeMo Gym says, `None` where it has not the shape of one; raises `BadConfig`."""
    found = SHAPE.fullmatch(entry)
    if found is None:
        return None
    kind, name, file = found["kind"], found["name"], found["file"]
    if kind == RESOURCES:
        return _resources(name, file)
    return _model(name, file) if kind == MODELS else _server(kind, name)


def _plain(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
        return name
    raise BadConfig(f"{name!r} can be no environment's name")


def _resources(name: str, file: str) -> str:
    files = UNJUDGED.get(name)
    if files is not None and file not in files:
        raise BadConfig(
            f"{name} has no file {file}.yaml here, as that one may ask a judge; put the file there, or name "
            f"{name}.yaml and set {name}.{name}.judge=PROVIDER/NAME"
        )
    return RESOURCES_TEXT.format(name=_plain(name))


def _server(kind: str, name: str) -> str:
    known = IMPLEMENTATIONS[AGENTS if kind == AGENTS else ENVIRONMENTS]
    if name in known:
        return SERVER_TEXT.format(kind=kind, name=name)
    what = "agent" if kind == AGENTS else "environment server"
    raise BadConfig(f"there is no {what} {name!r} here{suggestion(name, known, f'there are {_listed(known)}')}")


def _model(name: str, file: str) -> str:
    if name in REFUSED:
        raise BadConfig(f"{name} has no counterpart here; {REFUSED[name]}")
    known = tuple(each for each in IMPLEMENTATIONS[MODELS] if each != "gymsdk_model")
    if name not in known:
        raise BadConfig(
            f"there is no model server {name!r} here{suggestion(name, known, f'there are {_listed(known)}')}"
        )
    if file.removesuffix(TRAINING) != name:
        files = (name, f"{name}{TRAINING}")
        raise BadConfig(f"{name} has no file {file}.yaml here{suggestion(file, files, f'there are {_listed(files)}')}")
    base_url, api_key, model = SETTINGS.get(name, ENDPOINT)
    written = MODEL_TEXT.format(policy=POLICY, name=name, base_url=base_url, api_key=api_key, model=model)
    return written + "      return_token_id_information: true\n" * file.endswith(TRAINING)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
