"""Veiling: which values of a configuration nobody is shown, by what they are called and where they come from."""

from __future__ import annotations

import re

from gymsdk.configuration.nodes import Node
from gymsdk.configuration.places import Trail

ANYWHERE = re.compile(r"secret|passw|passphrase|credential|apikey|bearer|cookie|authorization")
"""What no key has in it that may be shown."""

WORDS = frozenset({"key", "keys", "token", "pass", "auth", "oauth", "dsn", "pat"})
"""Words of keys whose values are not shown."""

COUNTED = frozenset({"id", "ids", "limit", "budget", "length", "count", "per", "max", "min", "num", "file", "cost"})
"""Words beside `token` that say of what a policy reads and writes, or of a file, that it is counted or named."""

SHOWN = frozenset({"tls_key", "prompt_cache_key", "token_file", "pass_at_k", "pass_k"})

HEADERS = frozenset({"default_headers", "headers", "extra_headers"})

SETTINGS = 3
"""How many keys stand before the settings of a server: its name, kind and implementation."""

VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:")
REFERENCE = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")


def secrets(root: Node) -> set[str]:
    """Give the texts in *root* that nobody may read."""
    return {str(node.value) for trail, node in root.walk() if node.value and is_secret(trail)}


def is_secret(trail: Trail) -> bool:
    """Whether what *trail* leads to is a secret, by the name of it or of what it is part of."""
    if any(key.lower() in HEADERS for key in trail[:-1]):
        return True
    return any(_is_secret(key) for key in (trail[SETTINGS:] or trail[-1:]) if not key.isdecimal())


def exposed(what: str, instead: str) -> str:
    """Give the sentence about a secret that stands on the command line."""
    return f"{what} is on the command line, which everybody on this machine can read; put it into {instead}"


def _is_secret(key: str) -> bool:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    if spaced in SHOWN:
        return False
    if ANYWHERE.search(spaced.replace("_", "")):
        return True
    words = [word for word in re.split(r"[^a-z]+", spaced) if word]
    if "token" in words and COUNTED & set(words):
        words = [word for word in words if word != "token"]
    # `tokens` are counted, unless they let somebody in.
    lets_in = words[-1:] == ["tokens"] and bool({"api", "access", "auth", "refresh"} & set(words))
    return lets_in or bool(WORDS & set(words)) or any(word.endswith(("token", "apikey")) for word in words)


def veiled(root: Node) -> set[Trail]:
    """Give the trails of what is taken from environment variables in *root*, whose references stand there yet."""
    texts = {trail: node.value for trail, node in root.walk() if isinstance(node.value, str) and "${" in node.value}
    found = {trail for trail, text in texts.items() if VARIABLE.search(text)}
    while more := {trail for trail, text in texts.items() if trail not in found and _refers(text, found)}:
        found |= more
    return found


def is_veiled(trail: Trail, veils: set[Trail]) -> bool:
    """Whether *trail* leads to one of *veils*, or beneath it."""
    return any(trail[: len(veil)] == veil for veil in veils)


def _refers(text: str, found: set[Trail]) -> bool:
    for reference in REFERENCE.findall(text):
        way = tuple(key for key in re.split(r"[.\[\]]+", reference) if key)
        # A way from where it stands begins with a dot: its last key is all that is known of it here.
        relative = reference.startswith(".")
        if any((way[-1:] == each[-1:] if relative else way == each[: len(way)]) for each in found):
            return True
        if not relative and is_veiled(way, found):
            return True
    return False
