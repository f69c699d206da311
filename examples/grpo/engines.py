"""The two inference engines of the example: the generation server of this folder, and vLLM."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from exercises import Exercise
from models import CONTEXT, PAD, LogProbabilities, build_warm_model
from policy import create_policy
from torch import nn

HERE = Path(__file__).resolve().parent


class OwnEngine:
    """The generation server of this folder, which keeps the ids of messages as NeMo RL's does."""

    pad = PAD
    """The id that fills the end of short rows."""

    model_options = ("--token-interface", "nemo-rl")
    """The options of `gymsdk serve` for this engine."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.environment: dict[str, str] = {}
        """Further environment variables of the engine's process."""
        self.policy: nn.Module = create_policy(seed)

    def build_command(self, port: int) -> list[str]:
        """Return the command that serves the policy."""
        return [sys.executable, str(HERE / "generation_server.py"), "--port", str(port), "--seed", str(self._seed)]

    def push_weights(self, url: str) -> None:
        """Send the weights of the trainer's policy to the engine at *url*."""
        buffer = io.BytesIO()
        torch.save(self.policy.state_dict(), buffer)
        httpx.post(f"{url}/update_weights", content=buffer.getvalue(), timeout=60).raise_for_status()


class VllmEngine:
    """vLLM on the CPU, with a Qwen3 model of about 100,000 parameters.

    Args:
        python: The interpreter of an environment with vLLM.
        folder: A folder for the model's files.
        model: The model of transformers, after its warm-up.
        tokenizer: Its tokenizer.
    """

    pad = PAD
    model_options: tuple[str, ...] = ()

    def __init__(self, python: str, folder: Path, model: Any, tokenizer: Any) -> None:
        self._python = python
        self._folder = folder
        self._model = model
        self.policy: nn.Module = LogProbabilities(model)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        self.environment = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HERE),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }

    def build_command(self, port: int) -> list[str]:
        """Return the command that serves the policy."""
        server = ["-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--host", "127.0.0.1"]
        model = ["--model", str(self._folder), "--served-model-name", "policy", "--generation-config", "vllm"]
        # On the CPU, vLLM 0.32 fails if a request with a seed has a prompt in chunks.
        limits = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--no-enable-chunked-prefill"]
        updates = ["--worker-extension-cls", "weights.WeightUpdates"]
        return [self._python, *server, *model, *limits, *updates, "--enforce-eager", "--uvicorn-log-level", "warning"]

    def push_weights(self, url: str) -> None:
        """Let vLLM read the weights of the trainer's policy from disk."""
        self._model.save_pretrained(self._folder)
        call = {"method": "read_weights", "args": [str(self._folder)]}
        httpx.post(f"{url}/collective_rpc", json=call, timeout=60).raise_for_status()
        httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()


def create_engine(python: str | None, exercise: Exercise, folder: Path, seed: int) -> OwnEngine | VllmEngine:
    """Return vLLM in the environment of *python*, or the generation server of this folder."""
    if python is None:
        return OwnEngine(seed)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model, tokenizer = build_warm_model(exercise, seed)
    return VllmEngine(python, folder, model, tokenizer)
