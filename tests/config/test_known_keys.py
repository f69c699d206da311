"""Every key of a configuration keeps its place, its meaning and its error messages.

`stored/*/keys.json` holds the output of that version's `gymsdk config` for several values of each key in each place.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from gymsdk.cli import main

STORED = sorted(Path(__file__).parents[1].glob("stored/*/keys.json"))
ENVIRONMENT = "x:\n  resources_servers:\n    math: {}\n"

POLICY = (f"{ENVIRONMENT}policy_model", "responses_api_models")


def nest(block: str, kind: str, implementation: str, **others: str) -> tuple[str, dict[str, str]]:
    return f"{block}:\n  {kind}:\n    {implementation}:\n      ", others


AGENT = {"resources_server": "{type: resources_servers, name: x}"}
PLACES: dict[str, tuple[str, dict[str, str]]] = {
    "top": (ENVIRONMENT, {}),
    "head_server": (f"{ENVIRONMENT}head_server:\n  ", {"port": "11000"}),
    "token_id_capture": (f"{ENVIRONMENT}token_id_capture:\n  ", {"enabled": "true"}),
    "dataset": (
        "x:\n  resources_servers:\n    math:\n      datasets:\n      -\n        ",
        {"name": "rows", "type": "train", "jsonl_fpath": "rows.jsonl"},
    ),
    "math": nest("x", "resources_servers", "math"),
    "math_with_judge": nest("x", "resources_servers", "math_with_judge"),
    "simple_agent": nest(f"{ENVIRONMENT}y", "responses_api_agents", "simple_agent", **AGENT),
    "gymnasium_agent": nest(f"{ENVIRONMENT}y", "responses_api_agents", "gymnasium_agent", **AGENT),
    "gymsdk_model": nest(*POLICY, "gymsdk_model", model="endpoint/policy", base_url="http://127.0.0.1:8/v1"),
    "openai_model": nest(
        *(*POLICY, "openai_model"),
        openai_model="policy",
        openai_base_url="http://127.0.0.1:8/v1",
        openai_api_key="none",
    ),
    "vllm_model": nest(*POLICY, "vllm_model", model="policy", base_url="http://127.0.0.1:8/v1", api_key="none"),
    "single_agent_turn": nest("x", "environment_servers", "single_agent_turn"),
}
"""The beginning of a configuration whose last mapping is the place of the key, and the other keys of the mapping."""

VALUES = ("text", "7", "http://127.0.0.1:9/v1", "[a, 1]")
"""The values of a used key; an ignored key has the first."""


def describe(text: str) -> str:
    """Return the error or the warnings of a configuration, and the lines of `gymsdk config` that come from it."""
    Path("c.yaml").write_text(text)
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(["config", "--config", "c.yaml"])
    out, err = (stream.detach().getvalue().decode() for stream in (output, errors))
    lines = [" ".join(line.split()) for line in out.splitlines() if "# c.yaml:" in line]
    return "\n".join([f"exit code {ended.value.code or 0}", *err.splitlines(), *lines])


def build(place: str, key: str, value: str) -> str:
    """Return a configuration that has *key* at *place*."""
    start, others = PLACES[place]
    indent = " " * (len(start) - len(start.rstrip(" ")))
    return start + f"\n{indent}".join(f"{name}: {text}" for name, text in {**others, key: value}.items()) + "\n"


CASES = [
    pytest.param(place, keys, id=f"{path.parent.name}-{place}")
    for path in STORED
    for place, keys in json.loads(path.read_bytes()).items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "keys"), CASES)
def test_a_key_is_read_as_before(
    place: str, keys: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for key, before in keys.items():
        after = [describe(build(place, key, value)) for value in VALUES[: len(before)]]
        assert dict(zip(VALUES, after, strict=False)) == dict(zip(VALUES, before, strict=False)), key
