"""The two inference engines of the example: the generation server of this folder, and vLLM."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch
from exercises import EXERCISES, Exercise
from models import PAD, LogProbabilities, WarmModel, build_warm_model
from policy import create_policy
from torch import nn

HERE = Path(__file__).resolve().parent


class OwnEngine:
    """The generation server of this folder, which keeps the ids of messages as NeMo RL's does.

    Args:
        policy: The policy.
        arguments: The arguments with which the generation server loads the same policy.
        max_reply_tokens: The largest number of tokens of a reply.
    """

    pad = PAD
    """The id that fills the end of short rows."""

    model_options = ("--token-interface", "nemo-rl")
    """The options of `gymsdk serve` for this engine."""

    def __init__(self, policy: nn.Module, arguments: Sequence[str], max_reply_tokens: int) -> None:
        self.policy = policy
        self.max_reply_tokens = max_reply_tokens
        self._arguments = arguments
        self.environment: dict[str, str] = {}
        """Further environment variables of the engine's process."""

    def build_command(self, port: int) -> list[str]:
        """Return the command that serves the policy."""
        return [sys.executable, str(HERE / "generation_server.py"), "--port", str(port), *self._arguments]

    def push_weights(self, url: str) -> None:
        """Send the weights of the trainer's policy to the engine at *url*."""
        buffer = io.BytesIO()
        torch.save(self.policy.state_dict(), buffer)
        httpx.post(f"{url}/update_weights", content=buffer.getvalue(), timeout=60).raise_for_status()


class VllmEngine:
    """vLLM on the CPU, with a Qwen3 model of about 100,000 parameters.

    Args:
        python: The interpreter of an environment with vLLM.
        folder: The folder with the model's files.
        warm: The model after its warm-up.
    """

    pad = PAD
    model_options: tuple[str, ...] = ()

    def __init__(self, python: str, folder: Path, warm: WarmModel) -> None:
        self._python = python
        self._folder = folder
        self._model = warm.model
        self.policy: nn.Module = LogProbabilities(warm.model)
        self.max_reply_tokens = warm.max_reply_tokens
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
        context = str(self._model.config.max_position_embeddings)
        # On the CPU, vLLM 0.32 fails if a request with a seed has a prompt in chunks.
        limits = ["--dtype", "float32", "--max-model-len", context, "--no-enable-chunked-prefill"]
        updates = ["--worker-extension-cls", "weights.WeightUpdates"]
        return [self._python, *server, *model, *limits, *updates, "--enforce-eager", "--uvicorn-log-level", "warning"]

    def push_weights(self, url: str) -> None:
        """Let vLLM read the weights of the trainer's policy from disk."""
        self._model.save_pretrained(self._folder)
        call = {"method": "read_weights", "args": [str(self._folder)]}
        httpx.post(f"{url}/collective_rpc", json=call, timeout=60).raise_for_status()
        httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()


def create_engine(
    python: str | None, exercise: Exercise, split: str, folder: Path, seed: int
) -> OwnEngine | VllmEngine:
    """Return vLLM in the environment of *python*, or the generation server of this folder.

    Args:
        python: The interpreter of an environment with vLLM.
        exercise: The exercise.
        split: The split of the tasks of the warm-up.
        folder: A folder for the model's files.
        seed: The seed of the random weights.
    """
    if python is None and exercise == EXERCISES["digits"]:
        return OwnEngine(create_policy(seed), ["--seed", str(seed)], exercise.max_reply_tokens or 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warm = build_warm_model(exercise, split, seed)
    warm.tokenizer.save_pretrained(folder)
    warm.model.save_pretrained(folder)
    if python is not None:
        return VllmEngine(python, folder, warm)
    return OwnEngine(LogProbabilities(warm.model), ["--model", str(folder)], warm.max_reply_tokens)
