"""Every configuration error has an example that raises its message, and the page explains some of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from config.conftest import Write
from config.test_config_errors import INVALID

import gymsdk
from gymsdk import config
from gymsdk.config import fields
from gymsdk.deploy import plan
from gymsdk.errors import BadConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
ERROR_SECTION, STARTUP_SECTION = PAGE.split("## Error messages")[1].split("### Errors at startup")
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", ERROR_SECTION, re.MULTILINE)
SOURCE = Path(gymsdk.__file__).parent
MIN_FRAGMENT_CHARS = 7
"""The number of characters from which a fixed part of a message is searched for."""

TRANSLATED = {"a colon in a mapping must be followed by a space"}
"""Messages that are raised and then reported in another form."""

MATH = "math:\n  resources_servers:\n    sums:\n"
MODEL = "m:\n  responses_api_models:\n    gymsdk_model:\n      model: "
JUDGED = "math:\n  resources_servers:\n    math_with_judge:\n"
AGENT = "a:\n  responses_api_agents:\n    simple_agent:\n"
VLLM = "m:\n  responses_api_models:\n    vllm_model:\n"
NEMO_GYM_PATH = "responses_api_models/{0}/configs/{1}.yaml"

RAISED: dict[str, tuple[str, ...]] = {
    "this is not valid YAML; …": ("a:\n\tb: 1\n",),
    "this is nested too deeply": ("a: " + "[" * 5000,),
    "this is not a valid number or date": (f"log_dir: {'1' * 5000}\n",),
    "this contains a NUL character": ('log_dir: "\\0"\n',),
    "a key must be one word; …": ("[1]: 2\n",),
    "<< must merge a mapping; …": ("<<: 3\n",),
    "this cannot be read (…)": ("\udcff",),
    "… includes …; take one of them out of config_paths": ("config_paths: [a.yaml]\n",),
    "… is not a valid name of an environment": ("config_paths: [resources_servers/a.b/configs/x.yaml]\n",),
    "there is no agent … here": ("config_paths: [responses_api_agents/foo/configs/foo.yaml]\n",),
    "there is no environment server … here": ("config_paths: [environment_servers/foo/configs/foo.yaml]\n",),
    "there is no model server … here": (f"config_paths: [{NEMO_GYM_PATH.format('vlm_model', 'x')}]\n",),
    "… has no file … here": (f"config_paths: [{NEMO_GYM_PATH.format('vllm_model', 'x')}]\n",),
    "… is not a setting; write it as key=value": (MATH, "=3"),
    "… has an empty part": (MATH, "head_server..port=1"),
    "the value of … is not valid YAML": (MATH, "log_dir=[1"),
    "there is no … to delete": (MATH, "~nope"),
    "… inherits from …, which does not exist": (f"{MATH}      _inherit_from: nope\n",),
    "… inherits from …, and so from itself": (f"{MATH}      _copy: math\n",),
    "… has a reference that does not resolve: set the environment variable …": ("log_dir: ${oc.env:NOT_SET_HERE}\n",),
    "… has a reference that does not resolve: give the whole path …": (
        "log_dir: ${head_server.port.x}\nhead_server: {port: 1}\n",
    ),
    "… is both … and …": (f"{MATH}  responses_api_agents: {{}}\n",),
    "… must hold … lines, as in entrypoint: app.py": (VLLM.rstrip("\n") + " 3\n",),
    "… is not supported; …": (f"{AGENT}      execute_tools: false\n",),
    "… is true, but no judge is named; …": (f"{JUDGED}      should_use_judge: true\n",),
    "… has both … and …; keep one of them": (
        (
            f"{JUDGED}      judge: scripted/null\n      judge_model_server: {{type: responses_api_models, name: m}}\n"
            f"{MODEL}scripted/null\n"
        ),
    ),
    "….datasets must be a list of name and jsonl_fpath": (f"{MATH}      datasets: 3\n",),
    "… is given without …; TLS needs both": ("tls_key: k\n",),
    "observability_enabled needs model_call_capture_dir": ("observability_enabled: true\n",),
    "token_id_capture must hold enabled and dir": ("token_id_capture: /tokens\n",),
    "token_id_capture needs dir": ("token_id_capture: {enabled: true}\n",),
    "token_id_capture.sink and external_staging are not supported": (
        "token_id_capture: {enabled: true, dir: t, sink: a:B}\n",
    ),
    "….name must be the name of a server": (
        f"{AGENT}      resources_server: {{type: resources_servers, name: [1]}}\n",
    ),
    "… no environment named … is installed": (MATH.replace("    sums:", "    smus:"),),
    "… no setting of environment …": (f"{MATH}      digts: 1\n",),
    "… no scripted policy named …": (f"{MODEL}scripted/orakel\n",),
}
"""The text of a file, and overrides of the command line, for each message that `INVALID` does not have."""

UNTRUSTED: dict[str, tuple[str, str]] = {
    "… uses a function such as ${oc.env:…}": ("", "log_dir: ${oc.env:HOME}\n"),
    "… refers to …, which … sets": ("profile_dir: x\n", "log_dir: ${profile_dir}\n"),
    "… replaces the one of …": ("token_file: a.txt\n", "token_file: b.txt\n"),
    "… would let other machines reach these servers": ("", "insecure: true\n"),
    "… would receive the key or headers of …": (
        f"{VLLM}      model: x\n      api_key: secret\n",
        f"{VLLM}      base_url: http://127.0.0.1:1/v1\n",
    ),
}
"""The text of a named file and of an `env.yaml` that no command names, for the messages about untrusted files."""


def to_pattern(message: str) -> str:
    return ".*".join(map(re.escape, message.split("…")))


def test_every_documented_message_has_an_example() -> None:
    documented = [found for found, _ in ROWS]
    assert documented
    missing = set(documented) - {*RAISED, *UNTRUSTED}
    assert [
        message for message in missing if not any(re.search(to_pattern(message), line) for _, line in INVALID)
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("message", [*RAISED, *UNTRUSTED], ids=lambda message: message[:40])
def test_an_error_is_raised_with_its_message(message: str, write: Write, installed: Callable[..., Path]) -> None:
    installed()
    text, *overrides = RAISED[message] if message in RAISED else UNTRUSTED[message][:1]
    if message in UNTRUSTED:
        write("env.yaml", UNTRUSTED[message][1])
    path = write("a.yaml", "")
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadConfig) as caught:
        plan.check_deployment(config.load_config(["a.yaml"], overrides))
    [line] = str(caught.value).splitlines()
    assert re.match(rf"((a|env)\.yaml(:\d+)?|command line): (.*: )?{to_pattern(message)}", line)


def list_fragments(node: ast.expr) -> list[str]:
    """Return the fixed parts of a message, however the code builds it."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [text for text in texts if len(text.strip()) >= MIN_FRAGMENT_CHARS]


def list_messages() -> list[list[str]]:
    """Return the fixed parts of every message that the reader raises or collects."""
    messages: list[list[str]] = []
    for path in (SOURCE / "config").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Yield) and isinstance(call.value, ast.Tuple):
                message = call.value.elts[-1]
                messages += [list_fragments(message)] if isinstance(message, ast.JoinedStr) else []
            if not isinstance(call, ast.Call) or not call.args:
                continue
            called = ast.unparse(call.func)
            if called == "BadConfig" or called.endswith("problems.add"):
                messages.append(list_fragments(call.args[-1]))
    return [parts for parts in messages if parts and parts[0] not in TRANSLATED]


@pytest.mark.slow
def test_every_error_of_the_reader_has_an_example() -> None:
    messages = [*RAISED, *UNTRUSTED, *(line.split(": ", 1)[1] for _, line in INVALID)]
    fixed = [part.strip() for message in messages for part in message.split("…")]
    fixed = [part for part in fixed if len(part) >= MIN_FRAGMENT_CHARS]
    missing = [
        parts
        for parts in list_messages()
        if not any(one in part or part.strip() in one for part in parts for one in fixed)
    ]
    assert len(list_messages()) > 30
    assert missing == []


def test_documented_errors_at_start_up_exist_in_the_code() -> None:
    code = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    plain = re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*(?:#[^\n]*\n\s*)?f?"', "", code))
    rows = re.findall(r"^\| `(.+?)` \| .+ \|$", STARTUP_SECTION, re.MULTILINE)
    missing = [row for row in rows if not all(part.strip() in plain for part in row.split("…"))]
    assert len(rows) > 8
    assert missing == []


def test_every_supported_key_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", PAGE))
    used = (
        fields.TOP_LEVEL_KEYS.union(*fields.IMPLEMENTATION_KEYS.values()) - fields.MODEL_OPTIONS["gymsdk_model"].keys()
    )
    assert sorted(used - documented - {"disallowed_ports"}) == []
