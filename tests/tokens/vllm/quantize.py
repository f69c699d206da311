"""Write a copy of a model with 8-bit integer weights and activations, in the format of compressed-tensors.

Run it with the Python of an environment that has vLLM: `python quantize.py MODEL FOLDER`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INTEGERS | {"strategy": "channel", "dynamic": False},
            "input_activations": INTEGERS | {"strategy": "token", "dynamic": True},
        }
    },
}


def quantize(model: Path, folder: Path) -> None:
    """Write the quantized *model* into *folder*."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = torch.round(tensor / scale).to(torch.int8)
            tensors[name.replace(".weight", ".weight_scale")] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]))
