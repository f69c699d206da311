"""Discretion: secrets stay out of what is said, whoever repeats them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import SecretStr

from gymsdk.errors import Failed

LONGEST = 500
"""How much of a message is kept."""

TELLING = 8
"""Characters from which on a secret is one wherever it stands: a shorter one may be a part of any word."""


@contextmanager
def discreet(*secrets: SecretStr | None) -> Iterator[None]:
    """Keep *secrets* out of the message of any `Failed` raised inside, and cut the message only then."""
    try:
        yield
    except Failed as error:
        error.args = (blotted(str(error), filter(None, secrets))[:LONGEST],)
        raise


def blotted(text: str, secrets: Iterable[SecretStr]) -> str:
    """Give *text* without *secrets*, in whichever way JSON or Python may have written them.

    One of fewer than `TELLING` characters is left out only where it stands by itself: else the key `any` would make
    `m***` of `many`.
    """
    for secret in filter(None, (each.get_secret_value().strip() for each in secrets)):
        for form in {json.dumps(secret)[1:-1], repr(secret)[1:-1], secret.replace("/", r"\/"), secret}:
            text = text.replace(form, "***") if len(secret) >= TELLING else _without_word(text, form)
    return text


def _without_word(text: str, word: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "***", text)
