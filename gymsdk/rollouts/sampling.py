"""The sampling parameters that a run sends, for its folder and its first lines, and those of runs begun before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from typing import Any

from gymsdk.convert.chat import parse_metadata_extras
from gymsdk.errors import Failed
from gymsdk.models.exact_tokens import SAMPLING
from gymsdk.rollouts.jobs import Job
from gymsdk.types import Item, Model

SAMPLING_KEY = "sampling"
"""The key of run.json with the sampling parameters that the run sends. Earlier versions did not write it."""

ENGINE_DEFAULTS = "the engine's defaults"
SERVER_DEFAULTS = "the defaults of the servers' model"
EARLIER_SAMPLING = "temperature 1.0, top_p 1.0, unless a row sets them, as when the run began"


def describe_sampling(model: Model | None, requested: Mapping[str, Any]) -> str | None:
    """Return the sampling parameters of a run as text, `None` for a model that samples no tokens.

    Args:
        model: The model of the policy; `None` if servers play the run.
        requested: The parameters with which the run overrides those of the rows.
    """
    get_sampling = getattr(model, "get_sampling", None)
    if model is not None and get_sampling is None:
        return None
    sent = get_sampling(dict(requested)) if get_sampling is not None else requested
    defaults = ENGINE_DEFAULTS if model is not None else SERVER_DEFAULTS
    settings = ", ".join(f"{name} {value}" for name, value in sent.items() if value is not None)
    return f"{settings}; otherwise {defaults}" if settings else defaults


def began_with_fixed_sampling(about: Mapping[str, Any], models: Collection[str]) -> bool:
    """Whether a run was begun by a version that sent temperature and top_p 1.0 to *models* if no row set them."""
    return SAMPLING_KEY not in about and bool(models) and all(name.startswith("vllm/") for name in models)


async def add_earlier_sampling(jobs: AsyncIterator[Job], model: Model | None) -> AsyncIterator[Job]:
    """Yield *jobs* with the sampling parameters that earlier versions sent to *model* for rows without them."""
    get_sampling = getattr(model, "get_sampling", None)
    configured = get_sampling({}) if get_sampling is not None else {}
    defaults = {key: value for key, value in SAMPLING.items() if key not in configured}
    async for job in jobs:
        params = job.row["responses_create_params"]
        own = {key for key, value in {**_read_extras(params), **params}.items() if value is not None}
        added = {key: value for key, value in defaults.items() if key not in own}
        yield replace(job, row={**job.row, "responses_create_params": {**params, **added}})


def _read_extras(params: Item) -> Item:
    try:
        return parse_metadata_extras(params)
    except Failed:
        # The call of the model refuses the row.
        return {}
