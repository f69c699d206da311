"""Discretion: secrets stay out of what is said, whoever repeats them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import SecretStr

from gymsdk.errors import Failed

LONGEST = 500
"""How much of a message is kept."""


@contextmanager
def discreet(*secrets: SecretStr | None) -> Iterator[None]:
    """Keep *secrets* out of the message of any `Failed` raised inside, and cut the message only then."""
    try:
        yield
    except Failed as error:
        error.args = (blotted(str(error), filter(None, secrets))[:LONGEST],)
        raise


def blotted(text: str, secrets: Iterable[SecretStr]) -> str:
    """Give *text* without *secrets*, in whichever way JSON or Python may have written them."""
    for secret in filter(None, (each.get_secret_value().strip() for each in secrets)):
        for form in {json.dumps(secret)[1:-1], repr(secret)[1:-1], secret.replace("/", r"\/"), secret}:
            text = text.replace(form, "***")
    return text
