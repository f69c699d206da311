"""Veiling: which values of a configuration nobody is shown, by what they are called and where they come from."""

from __future__ import annotations

import re

from gymsdk.config.yaml import KeyPath, Node

SECRET_PATTERN = re.compile(r"secret|passw|passphrase|credential|apikey|bearer|cookie|authorization")
"""What no key has in it that may be shown."""

SECRET_WORDS = frozenset({"key", "keys", "token", "pass", "auth", "oauth", "dsn", "pat"})
"""Words of keys whose values are not shown."""

COUNT_WORDS = frozenset({"id", "ids", "limit", "budget", "length", "count", "per", "max", "min", "num", "file", "cost"})
"""Words beside `token` that say of what a policy reads and writes, or of a file, that it is counted or named."""

PUBLIC_KEYS = frozenset({"tls_key", "prompt_cache_key", "token_file", "pass_at_k", "pass_k"})

HEADER_KEYS = frozenset({"default_headers", "headers", "extra_headers"})

SETTINGS_DEPTH = 3
"""How many keys stand before the settings of a server: its name, kind and implementation."""

VARIABLE_PATTERN = re.compile(r"\$\{\s*oc\.env\s*:")
REFERENCE_PATTERN = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")


def find_secrets(root: Node) -> set[str]:
    """Give the texts in *root* that nobody may read."""
    return {str(node.value) for trail, node in root.walk() if node.value and is_secret(trail)}


def is_secret(trail: KeyPath) -> bool:
    """Whether what *trail* leads to is a secret, by the name of it or of what it is part of."""
    if any(key.lower() in HEADER_KEYS for key in trail[:-1]):
        return True
    return any(_is_secret(key) for key in (trail[SETTINGS_DEPTH:] or trail[-1:]) if not key.isdecimal())


def format_exposure_warning(what: str, instead: str) -> str:
    """Give the sentence about a secret that stands on the command line."""
    return f"{what} is on the command line, which everybody on this machine can read; put it into {instead}"


def _is_secret(key: str) -> bool:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    if spaced in PUBLIC_KEYS:
        return False
    if SECRET_PATTERN.search(spaced.replace("_", "")):
        return True
    words = [word for word in re.split(r"[^a-z]+", spaced) if word]
    if "token" in words and COUNT_WORDS & set(words):
        words = [word for word in words if word != "token"]
    # `tokens` are counted, unless they let somebody in.
    lets_in = words[-1:] == ["tokens"] and bool({"api", "access", "auth", "refresh"} & set(words))
    return lets_in or bool(SECRET_WORDS & set(words)) or any(word.endswith(("token", "apikey")) for word in words)


def find_redacted(root: Node) -> set[KeyPath]:
    """Give the trails of what is taken from environment variables in *root*, whose references stand there yet."""
    texts = {trail: node.value for trail, node in root.walk() if isinstance(node.value, str) and "${" in node.value}
    found = {trail for trail, text in texts.items() if VARIABLE_PATTERN.search(text)}
    while more := {trail for trail, text in texts.items() if trail not in found and _refers(text, found)}:
        found |= more
    return found


def is_redacted(trail: KeyPath, veils: set[KeyPath]) -> bool:
    """Whether *trail* leads to one of *veils*, or beneath it."""
    return any(trail[: len(veil)] == veil for veil in veils)


def _refers(text: str, found: set[KeyPath]) -> bool:
    for reference in REFERENCE_PATTERN.findall(text):
        way = tuple(key for key in re.split(r"[.\[\]]+", reference) if key)
        # A way from where it stands begins with a dot: its last key is all that is known of it here.
        relative = reference.startswith(".")
        if any((way[-1:] == each[-1:] if relative else way == each[: len(way)]) for each in found):
            return True
        if not relative and is_redacted(way, found):
            return True
    return False
