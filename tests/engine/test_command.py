"""The command line for vLLM, and the checks before it starts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from gymsdk import UsageError
from gymsdk.deploy import vllm_command
from gymsdk.deploy.vllm_command import Launch


def launch(*flags: str, name: str = "Qwen/Qwen3-4B", **options: bool) -> Launch:
    return Launch(name=name, flags=flags, **options)


def command_line(*flags: str, name: str = "Qwen/Qwen3-4B") -> str:
    return " ".join(vllm_command.build_command(launch(*flags, name=name), "vllm", 8123))


def test_vllm_listens_on_loopback_and_serves_the_requested_model_name() -> None:
    assert command_line() == (
        "vllm serve Qwen/Qwen3-4B --host 127.0.0.1 --port 8123 --served-model-name Qwen/Qwen3-4B"
        " --enable-auto-tool-choice --tool-call-parser hermes"
    )
    parsed = command_line("--tool-call-parser", "mine", name="my/policy")
    assert "--enable-auto-tool-choice --tool-call-parser mine" in parsed
    assert "reasoning" not in command_line(name="openai/gpt-oss-20b")


@pytest.mark.parametrize(
    ("flags", "absent"),
    [
        (("--port", "9000"), "8123"),
        (("--port=9000",), "8123"),
        (("--host", "::1"), "127.0.0.1"),
        (("--served-model-name", "Qwen/Qwen3-4B", "short"), "--served-model-name Qwen/Qwen3-4B --enable"),
        (("--tool-call-parser", "mine"), "hermes"),
        (("--tool_call_parser=mine",), "hermes"),
        (("--config", "vllm.yaml"), "--enable-auto-tool-choice"),
        (("--no-enable-auto-tool-choice",), "--enable-auto-tool-choice --tool"),
    ],
)
def test_user_flags_replace_the_default_flags(flags: tuple[str, ...], absent: str) -> None:
    assert absent not in command_line(*flags)
    assert command_line(*flags).endswith(" ".join(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--api-key", "secret"), "VLLM_API_KEY"),
        (("--api_key=secret",), "VLLM_API_KEY"),
        (("--uds", "/tmp/x"), "over HTTP"),
        (("--served-model-name", "short"), "Qwen/Qwen3-4B"),
        (("--host", "0.0.0.0"), "--insecure"),
        (("--ssl-keyfile", "key.pem"), "TLS"),
    ],
)
def test_flags_that_make_the_server_unusable_are_rejected(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(UsageError, match=message) as raised:
        vllm_command.check_launch(launch(*flags))
    assert "secret" not in str(raised.value)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    vllm_command.check_launch(launch("--host", "0.0.0.0"))


@pytest.mark.parametrize("port", ["0", "65536", "http", ""])
def test_an_invalid_port_is_rejected(port: str) -> None:
    with pytest.raises(UsageError, match="is not a port"):
        vllm_command.get_port(vllm_command.parse_flags(["--port", port]))


def test_a_flag_can_have_several_values_or_a_negative_value() -> None:
    options = vllm_command.parse_flags(["--seed", "-1", "-tp", "2", "--served_model_name", "a", "b", "--eager"])
    assert options == {"--seed": ("-1",), "-tp": ("2",), "--served-model-name": ("a", "b"), "--eager": ()}


def test_a_missing_vllm_program_is_reported_with_installation_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"pip install 'gymsdk\[vllm\]'(?s:.*)--base-url"):
        vllm_command.find_program()


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("Qwen/Qwen3-30B-A3B", "hermes"),
        ("Qwen/Qwen3-8B", "hermes"),
        ("Qwen/Qwen3-80B", "hermes"),
        ("Qwen/Qwen2.5-7B-Instruct", "hermes"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_coder"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json"),
        ("meta-llama/Meta-Llama-3-8B", None),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_pythonic"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek_v31"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek_v32"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", None),
        ("zai-org/GLM-4.6", "glm45"),
        ("zai-org/GLM-4.7-Flash", "glm47"),
        ("openai/gpt-oss-120b", "openai"),
        ("ibm-granite/granite-4.0-h-small", "granite4"),
        ("ibm-granite/granite-3.1-8b-instruct", "granite"),
        ("ibm-granite/granite-20b-functioncalling", "granite-20b-fc"),
        ("microsoft/Phi-4-mini-instruct", "phi4_mini_json"),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder"),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", None),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", None),
        ("MiniMaxAI/MiniMax-M2", "minimax_m2"),
        ("internlm/internlm2_5-7b-chat", "internlm"),
        ("tencent/Hunyuan-A13B-Instruct", "hunyuan_a13b"),
        ("/checkpoints/my-run/step-3000", None),
        ("/models/Qwen3-4B/checkpoint-12/", "hermes"),
        ("my/policy", None),
    ],
)
def test_the_model_family_is_detected_from_the_model_name(name: str, parser: str | None) -> None:
    family = vllm_command.find_family(name)
    assert (family.parser if family else None) == parser


@pytest.mark.parametrize(("config", "parser"), [('{"model_type": "qwen3_moe"}', "hermes"), ("[]", None), ("{", None)])
def test_the_model_family_is_detected_from_config_json(tmp_path: Path, config: str, parser: str | None) -> None:
    (tmp_path / "config.json").write_text(config)
    family = vllm_command.find_family(str(tmp_path))
    assert (family.parser if family else None) == parser


def test_the_selected_parser_and_chat_template_are_logged_in_one_line() -> None:
    line = vllm_command.log_command(launch(name="meta-llama/Llama-3.1-8B-Instruct"))
    assert "'llama3_json'" in line
    assert "Llama 3.1" in line
    assert "tool_chat_template_llama3.1_json.jinja" in line
    assert "\n" not in line
    assert "jinja" not in vllm_command.log_command(
        launch("--chat-template", "x", name="meta-llama/Llama-3.1-8B-Instruct")
    )


def test_a_launch_without_tools_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    vllm_command.log_command(launch(name="my/policy", tools=False))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
