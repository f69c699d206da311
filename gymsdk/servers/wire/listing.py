"""A listing: the models that a server has, in a form that the SDKs of OpenAI and Anthropic both read."""

from __future__ import annotations

from collections.abc import Container, Mapping

from gymsdk.convert.faces import anthropic_errors, errors
from gymsdk.convert.faces.face import Trouble
from gymsdk.transcript import Item

MISSING = 404


def entry(name: str) -> Item:
    """Give what OpenAI's list and Anthropic's say of the model *name*."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "gymsdk"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def listed(models: Mapping[str, Item]) -> Item:
    """Give the list of *models*, at least one."""
    names = list(models)
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": list(models.values()), **ends}


def one(models: Mapping[str, Item], name: str, headers: Container[str]) -> tuple[int, Item]:
    """Give the status and the body that tell of the model *name*, in the form that a client with *headers* reads."""
    if found := models.get(name):
        return 200, found
    sentence = f"no model named {name!r}; there is {', '.join(models)}, and requests may name any"
    trouble = Trouble(MISSING, sentence, code="model_not_found", param="model")
    return MISSING, (anthropic_errors if is_anthropics(headers) else errors).error(trouble)


def is_anthropics(headers: Container[str]) -> bool:
    """Whether *headers* are those of a client of Anthropic's API."""
    return "anthropic-version" in headers
