"""Families of models: the form in which each writes its calls of tools, by the name vLLM has for its parser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True, slots=True)
class Family:
    """Models called *name*, found by a *pattern* in theirs; some want a chat *template* out of vLLM's examples."""

    name: str
    pattern: str
    parser: str
    template: str | None = None


FAMILIES = (
    # Fine-tunes carry the name of what they were made of behind their own: they come first.
    Family("Hermes", "hermes-?[2-4]", "hermes"),
    Family("ToolACE", "toolace", "pythonic", "tool_chat_template_toolace.jinja"),
    Family("xLAM (Llama)", "llama-xlam", "xlam", "tool_chat_template_xlam_llama.jinja"),
    Family("xLAM (Qwen)", "xlam", "xlam", "tool_chat_template_xlam_qwen.jinja"),
    Family("Nemotron 3", "nemotron-?3(?![0-9])", "qwen3_coder"),
    Family("Qwen3-Coder", "qwen-?3-coder", "qwen3_coder"),
    Family("Qwen3.5", r"qwen-?3\.[5-9]|qwen3-5(?![0-9.]*b)", "qwen3_coder"),
    Family("Qwen2.5 and Qwen3", "qwen-?2[.-]5|qwen-?3|qwq", "hermes"),
    Family("Llama 4", "llama-?4", "llama4_pythonic", "tool_chat_template_llama4_pythonic.jinja"),
    Family("Llama 3.1", "llama-?3[.-][13](?![0-9])", "llama3_json", "tool_chat_template_llama3.1_json.jinja"),
    Family("Llama 3.2", "llama-?3[.-]2(?![0-9])", "llama3_json", "tool_chat_template_llama3.2_json.jinja"),
    Family("DeepSeek V4.1", "deepseek-?v4[.-]1(?![0-9])", "deepseek_v41"),
    Family("DeepSeek V4", "deepseek-?v4", "deepseek_v4"),
    Family("DeepSeek V3.1", "deepseek-?v3[.-](1|2-exp)", "deepseek_v31", "tool_chat_template_deepseekv31.jinja"),
    Family("DeepSeek V3.2", "deepseek-?v3[.-]2", "deepseek_v32"),
    Family("DeepSeek V3", "deepseek-?v3", "deepseek_v3", "tool_chat_template_deepseekv3.jinja"),
    Family("DeepSeek R1", "deepseek-?r1", "deepseek_v3", "tool_chat_template_deepseekr1.jinja"),
    Family("GLM-4.7 and GLM-5", "glm-?4[.-]7|glm-?5", "glm47"),
    Family("GLM-4.5", "glm-?4[.-][56]|glm4-moe", "glm45"),
    Family("gpt-oss", "gpt-?oss", "openai"),
    Family(
        "Granite 20B function calling", "granite-20b-f", "granite-20b-fc", "tool_chat_template_granite_20b_fc.jinja"
    ),
    Family("Granite 4", "granite-?4|granitemoehybrid", "granite4"),
    Family("Granite 3.0", "granite-?3[.-]0", "granite", "tool_chat_template_granite.jinja"),
    Family("Granite 3", "granite-?3", "granite"),
    Family("Phi-4-mini", "phi-?4-mini", "phi4_mini_json"),
    Family("Kimi K2", "kimi-?k2", "kimi_k2"),
    Family("Kimi K3", "kimi-?k3", "kimi_k3"),
    Family("MiniMax M2", "minimax-?m2", "minimax_m2"),
    Family("MiniMax M3", "minimax-?m3", "minimax_m3"),
    Family("InternLM 2.5", "internlm-?2", "internlm", "tool_chat_template_internlm2_tool.jinja"),
    Family("Hunyuan A13B", "hunyuan-a13b", "hunyuan_a13b"),
    Family("Mistral", "mistral|ministral|magistral|devstral", "mistral"),
    Family("Jamba", "jamba", "jamba"),
    Family("LongCat", "longcat", "longcat"),
    Family("Olmo 3", "olmo-?3", "olmo3"),
    Family("GigaChat 3", "gigachat-?3", "gigachat3"),
    Family("Apertus", "apertus", "apertus", "tool_chat_template_apertus.jinja"),
    Family("FunctionGemma", "functiongemma", "functiongemma", "tool_chat_template_functiongemma.jinja"),
    Family("Gemma 4", "gemma-?4", "gemma4"),
    Family("Seed-OSS", "seed-?oss", "seed_oss"),
    Family("Step 3.5", "step-?3[.p-]5-flash", "step3p5"),
    Family("ERNIE 4.5", "ernie-?4[.-]5", "ernie45"),
    Family("LFM2", "lfm-?2", "lfm2"),
)
"""In the order in which they are looked for."""

UNLIKE = re.compile("distill|-r1-.*qwen|openhermes|nemotron(?!-?3(?![0-9]))")
"""Models that are called after one family, and write calls as another, or not at all."""


def of(name: str) -> Family | None:
    """Give the family of the model *name*, or of the folder that it is, by what its `config.json` says too."""
    *_, last = name.rstrip("/").split("/")
    return _named(last) or _named(name) or (None if UNLIKE.search(name.lower()) else _named(_type(Path(name))))


def _named(name: str) -> Family | None:
    plain = re.sub("[_ ]", "-", name.lower())
    if UNLIKE.search(plain):
        return None
    return next((family for family in FAMILIES if re.search(rf"(?<![a-z])(?:{family.pattern})", plain)), None)


def _type(folder: Path) -> str:
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
