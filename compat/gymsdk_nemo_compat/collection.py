"""A collection: what `ng_collect_rollouts` is asked for, read from its words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymsdk.config.overrides import apply_overrides, parse_overrides
from gymsdk.config.yaml import COMMAND_LINE, Node, Problems, to_plain
from gymsdk.errors import UsageError, format_error_detail

NOT_HERE = {
    "num_repeats_add_seed": "repeats differ by the policy's sampling; give a seed by +responses_create_params.seed=N",
    "prompt_config": "write the prompts into the rows",
    "skills": "write what they say into the rows",
    "rollout_collection_driver": "write a program with gymsdk.play",
}
"""Settings of NeMo Gym's that cannot be passed over in silence, and what to do instead."""

PASSED_OVER = frozenset({"upload_rollouts", "disable_aggregation"})
"""Those that can: it is said that they mean nothing here."""


class Collection(BaseModel):
    """Rows of a file, played by an agent, and where its rollouts go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_jsonl_fpath: Path
    output_jsonl_fpath: Path
    agent_name: str | None = None
    limit: int | None = Field(None, ge=1)
    num_repeats: int = Field(1, ge=1)
    num_samples_in_parallel: int = Field(64, ge=1)
    responses_create_params: dict[str, Any] = {}
    resume_from_cache: bool = False


def read(words: Sequence[str]) -> tuple[Collection, list[str], list[str]]:
    """Give the collection that *words* ask for, those that mean nothing here, and the rest; raises `UsageError`."""
    problems = Problems()
    found = {word: each for word in words for each in parse_overrides([word], problems)}
    problems.raise_if_any()
    for each in found.values():
        if (key := each.path[0]) in NOT_HERE:
            raise UsageError(f"{key} has no equivalent in gymsdk; leave it out, and {NOT_HERE[key]}")
    own = [each for each in found.values() if each.path[0] in Collection.model_fields]
    ignored = [each.path[0] for each in found.values() if each.path[0] in PASSED_OVER]
    rest = [word for word, each in found.items() if each not in own and each.path[0] not in PASSED_OVER]
    values = to_plain(apply_overrides(Node({}, COMMAND_LINE), own, problems))
    problems.raise_if_any()
    return _checked({key: value for key, value in values.items() if value is not None}), ignored, rest


def _checked(values: dict[str, Any]) -> Collection:
    try:
        found = Collection.model_validate(values)
    except ValidationError as error:
        complaint = error.errors(include_url=False)[0]
        key = ".".join(map(str, complaint["loc"]))
        if complaint["type"] == "missing":
            raise UsageError(f"{key} is not given; write it as +{key}=FILE") from None
        words = format_error_detail(complaint)
        raise UsageError(f"{key}: {words[:1].lower()}{words[1:]}") from None
    if not found.input_jsonl_fpath.is_file():
        raise UsageError(f"input_jsonl_fpath: there is no file {found.input_jsonl_fpath}; name a JSONL file of rows")
    return found
