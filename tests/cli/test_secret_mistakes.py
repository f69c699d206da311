"""No message, file or log shows a secret, whatever mistake the user makes with the setting that holds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import SUMS

from cli.conftest import Command

SECRET = "hush-5ecret-Va1ue"
WORD = "hushword"

STRICT = (
    SUMS.replace("from pydantic import SecretStr", "from pydantic import BaseModel, SecretStr, field_validator")
    .replace("import Claims,", "import Claims, Model,")
    .replace(
        "class Settings(Config):",
        """class Judge(BaseModel, extra="forbid"):
    api_key: SecretStr
    pin: SecretStr = SecretStr("")
    kind: Literal["strict", "lenient"] = "strict"
    limit: int = 1

class Settings(Config):
    judge: Model | None = None
    judges: list[Judge] = []
    grading: Judge | None = None
    kind: Literal["one", "two"] = "one"
    options: dict[str, object] = {}
    picky: str = ""

    @field_validator("picky")
    @classmethod
    def _refuse(cls, value: str) -> str:
        if value:
            raise ValueError(f"{value!r} is not good enough")
        return value
""",
    )
)

OBJECT = json.dumps({"api_key": SECRET})

MISTAKES = {
    "a model as an object": f"judge={OBJECT}",
    "a model in a list": f"judge=[{OBJECT}]",
    "a model in wrong nesting": f'judge={{"model": {{"api_key": "{SECRET}"}}}}',
    "an object without its end": f'judge={{"api_key": "{SECRET}"',
    "an object with single quotes": f"judge={{'api_key': '{SECRET}'}}",
    "a model that is a key": f"judge={SECRET}",
    "a model of an unknown provider": f"judge=vlm/{SECRET}",
    "a model at an address with a password": f"judge=vllm/x@http://user:{SECRET}@127.0.0.1:9/v1",
    "a model at an address with a misspelt scheme": f"judge=vllm/x@htp://user:{SECRET}@127.0.0.1:9/v1",
    "a model at a whole endpoint": f"judge=vllm/x@http://127.0.0.1:9/v1?key={SECRET}/chat/completions",
    "an unknown key": f'grading={{"apikey": "{SECRET}"}}',
    "a key in the place of its value": f'grading={{"{SECRET}": "api_key"}}',
    "a wrong type beside a key": f'grading={{"api_key": "{SECRET}", "limit": "many"}}',
    "a key of the wrong type": f'grading={{"api_key": ["{SECRET}"]}}',
    "a key for a number": f'grading={{"api_key": "x", "limit": "{SECRET}"}}',
    "a key for one of two words": f'grading={{"api_key": "x", "kind": "{SECRET}"}}',
    "a list for an object": f'grading=["{SECRET}"]',
    "text for an object": f"grading={SECRET}",
    "a wrong element of a list": f'judges=[{{"api_key": "{SECRET}", "limit": "x"}}]',
    "text for a list": f"judges={SECRET}",
    "text for a number": f"digits={SECRET}",
    "text for one of two words": f"kind={SECRET}",
    "a value that a validator quotes": f"picky={SECRET}",
    "an unknown setting": f"keey={SECRET}",
    "a setting below another": f"sums.judge.api_key={SECRET}",
    "no setting": f"={SECRET}",
    "no value": SECRET,
    "an object without a setting": json.dumps({"judge": {"api_key": SECRET}}),
    "a colon in the place of the equals sign": f"judge:{OBJECT}",
    "an object in the place of the setting": f"{OBJECT}=1",
}


def read_everything(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def strict(installed: Callable[..., Path], gymsdk: Command) -> Command:
    """The command line, with an environment that has settings of many types."""
    installed(source=STRICT)
    return gymsdk


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("words", [("rollout", "--limit", 1, "-o", "out"), ("serve", "--port", 0)], ids=str)
def test_a_wrong_setting_does_not_show_a_secret(
    mistake: str, words: tuple[object, ...], strict: Command, workdir: Path
) -> None:
    command, *rest = words
    result = strict(command, "sums", *rest, "--set", mistake)
    assert result.code == 2, result
    assert SECRET not in result.out + result.err + read_everything(workdir)
    assert "Error: " in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("--pin", SECRET),
        ("--pin", f"input={SECRET}"),
        ("--pin", f'{{"api_key": "{SECRET}"}}'),
        ("--param", SECRET),
        ("--param", f"user={SECRET}"),
        ("--param", f"input={SECRET}"),
        ("--model", SECRET),
        ("--model", f"vlm/x@http://user:{SECRET}@127.0.0.1:9/v1"),
        ("--model", f"vllm/x@htp://user:{SECRET}@127.0.0.1:9/v1"),
        ("--model", "vllm/x", "--base-url", f"http://user:{SECRET}@127.0.0.1:9/v1"),
        ("--model", "vllm/x", "--base-url", f"127.0.0.1:9/v1?key={SECRET}"),
        ("--model", "vllm/x", "--base-url", f"http://127.0.0.1:9/v1/chat/completions?key={SECRET}/responses"),
        ("--head", f"http://user:{SECRET}@127.0.0.1:9"),
        ("--head", f"127.0.0.1:9?key={SECRET}"),
    ],
    ids=lambda words: " ".join(words).replace(SECRET, "SECRET"),
)
def test_a_wrong_option_does_not_show_a_secret(words: tuple[str, ...], strict: Command, workdir: Path) -> None:
    result = strict("rollout", "sums", "--limit", 1, "-o", "out", *words)
    assert result.code != 0, result
    assert SECRET not in result.out + result.err + read_everything(workdir)


BLOCK = "sums:\n  resources_servers:\n    sums:\n      entrypoint: app.py\n"
MODEL = (
    "policy_model:\n  responses_api_models:\n    vllm_model:\n      base_url: http://127.0.0.1:9/v1\n      model: x\n"
)

FILES = {
    "a setting as an object": f"{BLOCK}      judge: {OBJECT}\n",
    "a key for a number": f"{BLOCK}      digits: {SECRET}\n",
    "an unknown key": f'{BLOCK}      grading: {{apikey: "{SECRET}"}}\n',
    "a secret that is a word": f'{BLOCK}      judges: [{{pin: "{WORD}", limit: x}}]\n',
    "a key in the place of its value": f'{BLOCK}      grading: {{"{SECRET}": api_key}}\n',
    "a quoting validator": f"{BLOCK}      picky: {SECRET}\n",
    "a model's key for a number": f"{MODEL}      api_key: x\n      timeout: {SECRET}\n",
    "headers that are text": f"{MODEL}      api_key: x\n      default_headers: {SECRET}\n",
    "a header in a list": f"{MODEL}      api_key: x\n      default_headers: [{{x-api-key: {SECRET}}}]\n",
    "an address with a password": MODEL.replace("http://", f"http://user:{SECRET}@") + "      api_key: x\n",
    "an address without its scheme": MODEL.replace("http://127", f"user:{SECRET}@127") + "      api_key: x\n",
    "invalid YAML": f"policy_api_key: '{SECRET}\n",
    "a wrong indent": f"policy_api_key: x\n  {SECRET}: y\n",
    "an unresolved reference": f"policy_api_key: {SECRET}${{nothing}}\n",
    "an unfinished reference": f"policy_api_key: {SECRET}${{\n",
    "a default of a missing variable": f"policy_api_key: ${{oc.env:A_MISSING_ONE, {SECRET}, 3}}\n",
    "an object for the policy's key": f"policy_api_key: {{key: {SECRET}}}\n",
    "a port that is a key": f"head_server: {{port: {SECRET}}}\n",
    "a log level that is a key": f"log_level: {SECRET}\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
@pytest.mark.parametrize("command", ["config", "serve"])
def test_a_wrong_file_does_not_show_a_secret(text: str, command: str, strict: Command, workdir: Path) -> None:
    (workdir / "a.yaml").write_text(text)
    result = strict(command, "--config", "a.yaml")
    assert SECRET not in result.out + result.err
    assert WORD not in result.out + result.err
    if command == "serve":
        assert result.code != 0, result


@pytest.mark.parametrize(
    "word",
    [
        f"policy_api_key={{{SECRET}",
        f"policy_api_key=[{SECRET}]",
        f"{SECRET}=x",
        f"sums.digits={SECRET}",
        f"head_server.port={SECRET}",
        f"~{SECRET}",
    ],
)
def test_a_wrong_override_does_not_show_a_secret(word: str, strict: Command, workdir: Path) -> None:
    (workdir / "a.yaml").write_text(BLOCK + MODEL)
    result = strict("serve", "--config", "a.yaml", word)
    assert result.code != 0, result
    assert SECRET not in result.out + result.err


@pytest.mark.parametrize(
    "words",
    [
        ("--set", f"key={SECRET}"),
        (f"--set=key={SECRET}",),
        ("--set", f'options={{"api_key": "{SECRET}", "deep": [{{"token": "{SECRET}"}}]}}'),
        ("--set", f'grading={{"api_key": "{SECRET}"}}'),
        ("--set", f'judges=[{{"api_key": "{SECRET}"}}]'),
        ("--set", f"judge=vllm/x@http://127.0.0.1:9/v1?key={SECRET}"),
    ],
    ids=lambda words: words[-1].replace(SECRET, "SECRET"),
)
def test_a_run_stores_no_secret(words: tuple[str, ...], strict: Command, workdir: Path) -> None:
    arguments = ("rollout", "sums", "--limit", 1, "-o", "out", *words)
    result = strict(*arguments, "--json")
    assert result.code == 0, result
    assert SECRET not in result.out + result.err + read_everything(workdir)
    # The redacted settings still equal those of the same run.
    again = strict(*arguments, "--resume")
    assert again.code == 0, again
