"""Play weather rollouts with inspect_ai against the stub model server: two model calls and one tool call each.

usage: inspect_ai_peer.py STUB_URL ROLLOUTS IN_FLIGHT      run with a Python that has inspect_ai and openai installed

The script prints the CPU time per rollout in milliseconds, the number of scored rollouts and the version of inspect_ai
as a line of JSON, after a warm-up.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.metadata import version

from inspect_ai import Task, eval  # noqa: A004  # the public name in inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

WARM_UP = 64


@tool
def get_weather():  # noqa: ANN201  # a type of inspect_ai, which the checker does not have
    """Return the tool of the environment."""

    async def execute(city: str) -> str:
        """Get the weather.

        Args:
            city: The city.
        """
        return json.dumps({"city": city, "weather_description": f"The weather in {city} is cold."})

    return execute


def play(stub: str, rollouts: int, in_flight: int) -> int:
    """Play rollouts and return the number of those that were scored as correct."""
    samples = [Sample(input=f"what's it like in sf? (request {number})", target="cold") for number in range(rollouts)]
    task = Task(dataset=samples, solver=[use_tools(get_weather()), generate()], scorer=includes())
    model = get_model("openai/stub", base_url=f"{stub}/v1", api_key="none", responses_api=False, memoize=False)
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(
            task,
            model=model,
            max_connections=in_flight,
            max_samples=in_flight,
            display="none",
            log_dir=folder,
            log_level="error",
        )
        # inspect_ai reads the samples from the log folder.
        return sum(sample.scores["includes"].value == "C" for sample in log.samples or [])


def main(stub: str, rollouts: int, in_flight: int) -> None:
    """Print the measurement."""
    play(stub, WARM_UP, WARM_UP)
    before = sum(os.times()[:4])
    scored = play(stub, rollouts, in_flight)
    cpu = sum(os.times()[:4]) - before
    print(json.dumps({"cpu": 1e3 * cpu / rollouts, "scored": scored, "version": version("inspect-ai")}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
