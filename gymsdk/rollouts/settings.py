"""The settings of a run that users choose. Commands take them as options, so this module imports little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gymsdk.models.options import DEFAULT_TIMEOUT_SECONDS
from gymsdk.settings import LIMITS, MODEL, OUTPUT, RUN, SAMPLING, SELECTION, TASKS, Flag


def _check_seed(value: int) -> int:
    if value.bit_length() > 63:  # noqa: PLR2004  # JSON readers represent 64-bit integers exactly
        raise ValueError("a seed has at most 63 bits")
    return value


def _check_head(value: str | None) -> str | None:
    from gymsdk import credentials

    return None if value is None else credentials.check_head_url(value)


class FrozenSettings(BaseModel):
    """The base of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Rows(FrozenSettings):
    """The rows that a run plays."""

    tasks: Annotated[Path | None, Flag(TASKS, "FILE")] = Field(
        None, description="Read task rows from a JSONL file instead of a split."
    )
    split: Annotated[str | None, Flag(TASKS, "NAME")] = Field(
        None, description="Play this split. By default, play `example`, or the first split if there is no `example`."
    )
    limit: Annotated[int | None, Flag(TASKS, "N")] = Field(
        None,
        ge=1,
        description="Play at most N tasks of the file, or of each environment's split (then 100 by default).",
    )
    repeats: Annotated[int, Flag(TASKS, "K", ("--repeats", "-k"))] = Field(
        1, ge=1, description="Play each task K times."
    )
    seed: Annotated[int, AfterValidator(_check_seed), Flag(TASKS, "S")] = Field(
        0, description="Seed generated rows, episodes and scripted models."
    )
    skip_bad_rows: Annotated[bool, Flag(TASKS)] = Field(False, description="Skip invalid rows of the file.")


class Servers(FrozenSettings):
    """The running servers that play a run."""

    head: Annotated[str | None, AfterValidator(_check_head), Flag(RUN, "URL")] = Field(
        None, description="Use the running servers of this head, as in http://127.0.0.1:11000."
    )
    agent: Annotated[str | None, Flag(RUN, "NAME")] = Field(
        None, description="Let this agent of --head play rows that name no agent."
    )


class Policy(FrozenSettings):
    """The model that plays."""

    model: Annotated[str | None, Flag(MODEL, "PROVIDER/NAME", shown="scripted/oracle")] = Field(
        None, description="Play with this model: scripted/oracle, vllm/NAME, endpoint/NAME, openai/NAME."
    )


class Sampling(FrozenSettings):
    """The sampling parameters of requests that override those of each row."""

    temperature: Annotated[float | None, Flag(SAMPLING, "T")] = Field(
        None, ge=0.0, description="Set the model's sampling temperature."
    )
    top_p: Annotated[float | None, Flag(SAMPLING, "P")] = Field(
        None, ge=0.0, le=1.0, description="Set the probability mass of nucleus sampling."
    )
    max_output_tokens: Annotated[int | None, Flag(SAMPLING, "N")] = Field(
        None, ge=1, description="Limit each response of the model to N tokens."
    )
    params: Annotated[tuple[str, ...], Flag(SAMPLING, "KEY=JSON", ("--param",))] = Field(
        (), description="Set another request parameter."
    )


class RunLimits(FrozenSettings):
    """How a run is executed; *timeout* limits the seconds of a model call."""

    concurrency: Annotated[int, Flag(RUN, "C")] = Field(64, ge=1, description="Play up to C episodes concurrently.")
    attempts: Annotated[int, Flag(LIMITS, "N")] = Field(3, ge=1, description="Try an episode that fails up to N times.")
    timeout: float = DEFAULT_TIMEOUT_SECONDS


class RunOutput(FrozenSettings):
    """What a run writes, and where."""

    trajectories: Annotated[bool, Flag(OUTPUT)] = Field(
        False, description="Add NeMo Gym's `ng_trajectory` to each line of rollouts.jsonl."
    )
    view: Annotated[bool, Flag(OUTPUT)] = Field(False, description="Show the run in the browser while it plays.")
    export: Annotated[str | None, Flag(OUTPUT, "SERVICE", shown=False)] = Field(
        None, description="Send the run to wandb, mlflow or otel while it plays, as `gymsdk export` does afterwards."
    )
    output: Annotated[Path | None, Flag(OUTPUT, "DIR", ("--output", "-o"))] = Field(
        None, description="Write the run to this folder. By default, to a new one in ./rollouts."
    )
    resume: Annotated[bool, Flag(OUTPUT)] = Field(False, description="Continue the run in the folder.")
    force: Annotated[bool, Flag(OUTPUT)] = Field(
        False, description="With --resume, continue although code has changed."
    )
    overwrite: Annotated[bool, Flag(OUTPUT)] = Field(False, description="Replace the run in the folder.")

    @property
    def run_options(self) -> dict[str, Any]:
        """The arguments of a `Run` about its folder."""
        return self.model_dump(include={"resume", "force", "overwrite", "trajectories"})


class Selection(FrozenSettings):
    """Which rollouts training files get."""

    best: Annotated[int, Flag(SELECTION, "N")] = Field(
        1, ge=1, description="Write the N best rollouts or pairs of each task."
    )
    min_reward: Annotated[float | None, Flag(SELECTION, "R", shown=False)] = Field(
        None,
        allow_inf_nan=True,
        description="Write rollouts with at least this reward. By default, with any above 0.",
    )
    min_gap: Annotated[float, Flag(SELECTION, "R")] = Field(
        0.0, ge=0, allow_inf_nan=True, description="Pair rollouts whose rewards differ by at least this."
    )
    environment: Annotated[str | None, Flag(SELECTION, "NAME", shown=False)] = Field(
        None, description="Write rollouts of this environment only."
    )
    truncated: Annotated[bool, Flag(SELECTION)] = Field(False, description="Write episodes that a budget ended, too.")
    reasoning: Annotated[bool, Flag(SELECTION, names=("--reasoning/--no-reasoning",))] = Field(
        True, description="Write the reasoning of the policy."
    )

    def accepts_reward(self, reward: float) -> bool:
        """Whether a rollout with this *reward* may be exported or chosen."""
        return reward > 0 if self.min_reward is None else reward >= self.min_reward
