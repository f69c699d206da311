"""Compare log-probabilities of an engine with those that the model's own code computes for the same tokens.

Run it with the Python of an environment that has transformers: `python check_logprobs.py MODEL < SEQUENCES`. Each line
of the input is a JSON object with the `ids` of a whole conversation, and a list `generations` of the position and the
log-probabilities of each generation in it. The output is a JSON object with the number of tokens, the largest
difference, and the largest difference of each sequence.
"""

from __future__ import annotations

import json
import sys


def main(folder: str) -> None:
    """Print the largest difference between the given log-probabilities and those of the model in *folder*."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    largest: list[float] = []
    count = 0
    for line in sys.stdin:
        sequence = json.loads(line)
        ids = torch.tensor([sequence["ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)
        largest.append(0.0)
        for start, expected in sequence["generations"]:
            for offset, value in enumerate(expected):
                position = start + offset
                computed = logprobs[position - 1, ids[0, position]].item()
                largest[-1] = max(largest[-1], abs(computed - value))
                count += 1
    json.dump({"tokens": count, "largest": max(largest), "by_sequence": largest}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
