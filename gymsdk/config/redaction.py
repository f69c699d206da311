"""Decide which values of a configuration are secret, by their keys and by where they come from."""

from __future__ import annotations

import re

from gymsdk.config.yaml import KeyPath, Node

SECRET_PATTERN = re.compile(r"secret|passw|passphrase|credential|apikey|bearer|cookie|authorization")
"""Text in keys, without underscores, that marks their values as secret."""

SECRET_WORDS = frozenset({"key", "keys", "token", "pass", "auth", "oauth", "dsn", "pat"})
"""Words in keys that mark their values as secret."""

COUNT_WORDS = frozenset({"id", "ids", "limit", "budget", "length", "count", "per", "max", "min", "num", "file", "cost"})
"""Words beside `token` in keys that are not about an access token: counts of a model's tokens, and file names."""

PUBLIC_KEYS = frozenset({"tls_key", "prompt_cache_key", "token_file", "pass_at_k", "pass_k"})

HEADER_KEYS = frozenset({"default_headers", "headers", "extra_headers"})

SETTINGS_DEPTH = 3
"""The number of keys above the settings of a server: its name, kind and implementation."""

VARIABLE_PATTERN = re.compile(r"\$\{\s*oc\.env\s*:")
REFERENCE_PATTERN = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")


def find_secrets(root: Node) -> set[str]:
    """Return the secret values in *root*."""
    return {str(node.value) for path, node in root.walk() if node.value and is_secret(path)}


def is_secret(path: KeyPath) -> bool:
    """Whether the value at *path* is secret, by its own key, or by a key above it within a server's settings."""
    if any(key.lower() in HEADER_KEYS for key in path[:-1]):
        return True
    return any(_is_secret_key(key) for key in (path[SETTINGS_DEPTH:] or path[-1:]) if not key.isdecimal())


def format_exposure_warning(what: str, instead: str) -> str:
    """Return the warning about a secret on the command line."""
    return f"{what} is on the command line, which all users of this machine can read; put it into {instead}"


def _is_secret_key(key: str) -> bool:
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")
    if snake_case in PUBLIC_KEYS:
        return False
    if SECRET_PATTERN.search(snake_case.replace("_", "")):
        return True
    words = [word for word in re.split(r"[^a-z]+", snake_case) if word]
    if "token" in words and COUNT_WORDS & set(words):
        words = [word for word in words if word != "token"]
    # `tokens` usually are a model's tokens, except for access tokens.
    are_access_tokens = words[-1:] == ["tokens"] and bool({"api", "access", "auth", "refresh"} & set(words))
    ends_in_secret = any(word.endswith(("token", "apikey")) for word in words)
    return are_access_tokens or bool(SECRET_WORDS & set(words)) or ends_in_secret


def find_redacted(root: Node) -> set[KeyPath]:
    """Return the paths of values in *root* that come from environment variables, directly or through references.

    The references in *root* are not yet resolved.
    """
    texts = {path: node.value for path, node in root.walk() if isinstance(node.value, str) and "${" in node.value}
    found = {path for path, text in texts.items() if VARIABLE_PATTERN.search(text)}
    while more := {path for path, text in texts.items() if path not in found and _refers_to(text, found)}:
        found |= more
    return found


def is_redacted(path: KeyPath, redacted: set[KeyPath]) -> bool:
    """Whether *path* or a path above it is one of *redacted*."""
    return any(path[: len(each)] == each for each in redacted)


def _refers_to(text: str, paths: set[KeyPath]) -> bool:
    for reference in REFERENCE_PATTERN.findall(text):
        target = tuple(key for key in re.split(r"[.\[\]]+", reference) if key)
        # Of a relative reference, which starts with a dot, only the last key is compared.
        is_relative = reference.startswith(".")
        if any((target[-1:] == path[-1:] if is_relative else target == path[: len(target)]) for path in paths):
            return True
        if not is_relative and is_redacted(target, paths):
            return True
    return False
