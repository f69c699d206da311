"""Show the resolved settings of a deployment with secrets redacted, and write a first configuration file."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from gymsdk.config.fields import HEADER_KEYS, get_endpoint_keys
from gymsdk.config.model import MODELS, SERVER_KINDS, Deployment, ModelServerConfig, ServerConfig, Setting
from gymsdk.config.yaml import (
    DEFAULT_PLACE,
    KeyPath,
    Place,
    YamlNode,
    format_key_path,
    map_values,
    redact_secrets,
    to_plain,
)
from gymsdk.credentials import redact
from gymsdk.http.tls import mask_url, redact_url

SECRET_PATTERN = re.compile(
    r"secret|passw|passphrase|passcode|credential|apikey|bearer|cookie|authorization|conn(ection)?str|jwt|webhook"
    r"|(private|priv|access|signing|ssh)key"
)
"""Text in keys, without underscores, that marks their values as secret."""

SECRET_WORDS = frozenset(
    {"key", "keys", "token", "pass", "auth", "oauth", "dsn", "pat", "pwd", "cred", "creds", "otp", "totp", "sas"}
)
"""Words in keys that mark their values as secret."""

COUNT_WORDS = frozenset({"id", "ids", "limit", "budget", "length", "count", "per", "max", "min", "num", "file", "cost"})
"""Words in keys beside `token` that show that the value is a count of a model's tokens, or a file name."""

PUBLIC_KEYS = frozenset({"tls_key", "prompt_cache_key", "token_file", "pass_at_k", "pass_k"})
"""Keys with a word that marks secrets, but with a value that is not secret."""

SETTINGS_DEPTH = 3
"""The number of keys above the settings of a server: its name, kind and implementation."""

VARIABLE_PATTERN = re.compile(r"\$\{\s*oc\.env\s*:(?:\s*(\w+)\s*(?=[,}]))?")


def find_secrets(root: YamlNode) -> set[str]:
    """Return the secret values in *root*."""
    return {str(node.value) for path, node in root.leaves() if node.value and is_secret(path)}


def is_secret(path: KeyPath) -> bool:
    """Whether the value at *path* is secret, by its own key, or by a key above it within a server's settings."""
    if any(key.lower() in {*HEADER_KEYS, "extra_headers"} for key in path[:-1]):
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
    # The plural `tokens` usually means a model's tokens.
    are_access_tokens = words[-1:] == ["tokens"] and bool({"api", "access", "auth", "refresh"} & set(words))
    ends_in_secret = any(word.endswith(("token", "apikey", "pwd")) for word in words)
    return are_access_tokens or bool(SECRET_WORDS & set(words)) or ends_in_secret


class VariableUses:
    """The environment variables that the values of a configuration come from, directly or through references.

    A variable is secret by its name, or because a secret value comes from it. An empty name stands for what is secret
    without a name: a variable with a composed name, and a default that refers to a secret.

    Args:
        root: The configuration, with its references not yet resolved.
    """

    def __init__(self, root: YamlNode) -> None:
        self._own: defaultdict[KeyPath, set[str]] = defaultdict(set)
        self._below: defaultdict[KeyPath, set[str]] = defaultdict(set)
        texts = {path: node.value for path, node in root.leaves() if isinstance(node.value, str) and "${" in node.value}
        targets = {path: [*_find_targets(text)] for path, text in texts.items()}
        for path, text in texts.items():
            names = {*VARIABLE_PATTERN.findall(text)}
            keys = {key for target in targets[path] for key in target} - names
            self._add(path, names | {""} if names and any(map(_is_secret_key, keys)) else names)
        references = [(path, target) for path in texts for target in targets[path]]
        # Each pass follows references one step further.
        while sum(self._add(path, self.find(target)) for path, target in references):
            continue
        names = set[str]().union(*self._own.values())
        # These two are folders of the shell.
        self._secret = {name for name in names - {"PWD", "OLDPWD"} if not name or _is_secret_key(name)}
        # Also below a key that marks secrets outside of servers, as in a section `secrets` to which servers refer.
        outside = [path for path in texts if not {*path[1:2]} & {*SERVER_KINDS}]
        secret_paths = [path for path in outside if any(map(_is_secret_key, path))]
        self._secret.update(*(self.find(path) for path in (*secret_paths, *filter(is_secret, texts))))

    def _add(self, path: KeyPath, names: Collection[str]) -> bool:
        """Add the *names* of variables to those of the text at *path*, and return whether one is new."""
        if self._own[path].issuperset(names):
            return False
        # The target of a relative reference depends on its place, so that only the last key is compared.
        for key in (*(path[:end] for end in range(1, len(path) + 1)), ("", path[-1])):
            self._below[key].update(names)
        self._own[path].update(names)
        return True

    def find(self, path: KeyPath) -> frozenset[str]:
        """Return the variables that the value at *path* comes from."""
        above = (self._own.get(path[:end], ()) for end in range(1, len(path)))
        return frozenset(self._below.get(path, ())).union(*above)

    def is_secret(self, path: KeyPath) -> bool:
        """Whether the value at *path* comes from a secret variable."""
        return not self._secret.isdisjoint(self.find(path))


def _find_targets(text: str) -> Iterator[KeyPath]:
    """Yield what *text* may refer to, also in arguments of functions; `("", KEY)` for a relative reference."""
    for interpolation in re.findall(r"\$\{([^}]*)", text):
        for word in re.findall(r"[\w.\[\]-]+", interpolation):
            if keys := tuple(filter(None, re.split(r"[.\[\]]+", word))):
                yield ("", keys[-1]) if word.startswith(".") else keys


REDACTED = "***"


def list_settings(root: YamlNode, deployment: Deployment, secrets: set[str], uses: VariableUses) -> tuple[Setting, ...]:
    """Return all settings of a deployment, including defaults, with secrets redacted.

    Args:
        secrets: The texts to redact in all values.
        uses: The variables that values come from.
    """
    # The value of a secret variable may also occur under other keys.
    secrets = secrets | {str(node.value) for path, node in root.leaves() if node.value and uses.is_secret(path)}
    written = {path: (value, place, path) for path, value, place in _list_values(root, ())}
    for server in deployment.get_servers(MODELS):
        written |= dict(_list_endpoint(root, server))
    defaults = {
        path: (value, DEFAULT_PLACE, ("default_host",) if path[-1] == "host" else path)
        for path, value in _list_defaults(deployment)
        if root.get(*path) is None
    }
    ordered = sorted((written | defaults).items(), key=lambda item: _get_sort_key(item[0], deployment))
    return tuple(
        Setting(
            path=path,
            value=_redact_setting(path, value, secrets, source, uses),
            place=place,
            variables=uses.find(source),
        )
        for path, (value, place, source) in ordered
    )


def _redact_setting(path: KeyPath, value: Any, secrets: set[str], source: KeyPath, uses: VariableUses) -> Any:
    """Return *value* redacted; it comes from the value at *source*."""
    redacted = REDACTED if uses.is_secret(source) else _redact(path, value, secrets)
    # What else is in the value of a variable, such as the rest of a password in a URL, is not known.
    has_secret = redacted != value or _has_secret_assignment(str(value))
    return REDACTED if has_secret and uses.find(source) else redacted


def _has_secret_assignment(text: str) -> bool:
    """Whether *text* has a secret behind its key, as in `Server=db;Password=…`."""
    return any(map(_is_secret_key, re.findall(r"(?<![\w-])([\w-]+)\s*=", text)))


def redact_fields(deployment: Deployment, fields: Mapping[str, Collection[str]]) -> Deployment:
    """Return *deployment* with further settings redacted: the *fields* of each server, by the server's name."""
    settings: dict[KeyPath, Setting] = {}
    variables: set[str] = set()
    for setting in deployment.settings:
        names = fields.get(setting.path[0], ())
        depth = next((depth for depth, key in enumerate(setting.path) if depth and key in names), None)
        if depth is None:
            settings.setdefault(setting.path, setting)
            continue
        # The keys below a secret setting are not shown either: a user may have mixed up a key and its value.
        path = setting.path[: depth + 1]
        settings.setdefault(path, setting.model_copy(update={"path": path, "value": REDACTED}))
        variables |= setting.variables
    shown = (
        setting.model_copy(update={"value": REDACTED}) if setting.variables & variables else setting
        for setting in settings.values()
    )
    return deployment.model_copy(update={"settings": tuple(shown)})


def format_yaml_lines(deployment: Deployment) -> Iterator[str]:
    """Yield the settings as lines of YAML, each with its place in a comment."""
    previous: KeyPath = ()
    for setting in deployment.settings:
        path = setting.path
        pairs = zip(previous[:-1], path[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for depth in range(shared, len(path) - 1):
            yield f"{'  ' * depth}{path[depth]}:"
        line = f"{'  ' * (len(path) - 1)}{path[-1]}: {_format_value(setting.value)}"
        # A longer value moves the comment to the right.
        yield f"{line:<48}  # {setting.place}"
        previous = path


def dump_settings(deployment: Deployment) -> dict[str, Any]:
    """Return the settings, the ignored keys and the warnings as a JSON object."""
    settings = {
        format_key_path(setting.path): {"value": setting.value, "from": str(setting.place)}
        for setting in deployment.settings
    }
    return {"settings": settings, "ignored": list(deployment.ignored), "notes": list(deployment.notes)}


def build_starter_file(name: str, settings: Mapping[str, Any]) -> str:
    """Return a configuration that serves the environment *name*, with its *settings* and defaults as comments."""
    heading = ["      # The environment's own settings, and their defaults:"] if settings else []
    lines = [f"      # {key}: {json.dumps(value, ensure_ascii=False, default=str)}" for key, value in settings.items()]
    template = Path(__file__).with_name("starter.yaml").read_text(encoding="utf-8")
    return template.format(name=name, settings="".join(f"{line}\n" for line in [*heading, *lines]))


def _list_values(node: YamlNode, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Place]]:
    for key, child in node.children.items():
        child_path = (*path, key)
        if child.is_mapping and child.children:
            yield from _list_values(child, child_path)
        elif child.value is not None:
            yield child_path, to_plain(child), child.place


def _list_defaults(deployment: Deployment) -> Iterator[tuple[KeyPath, Any]]:
    head_host, head_port = deployment.head_address
    yield ("head_server", "host"), head_host
    yield ("head_server", "port"), head_port
    yield ("default_host",), deployment.host
    yield ("insecure",), deployment.insecure
    yield ("log_level",), deployment.logs.level
    yield ("log_format",), deployment.logs.format
    yield ("model_endpoint_readiness_timeout_seconds",), deployment.readiness
    for server in deployment.servers:
        path = (server.name, server.kind, server.implementation)
        yield (*path, "host"), server.host or deployment.host
        yield (*path, "port"), 0
        for key, name in server.refers.items():
            yield (*path, key, "name"), name


def _list_endpoint(root: YamlNode, server: ServerConfig) -> Iterator[tuple[KeyPath, tuple[Any, Place, KeyPath]]]:
    """Yield the base URLs, the model and the key that a model server uses, each with its place and the path there."""
    if not isinstance(server.kind_settings, ModelServerConfig) or server.implementation == "gymsdk_model":
        return
    path = (server.name, server.kind, server.implementation)
    url_key, api_key_key, model_key = get_endpoint_keys(server.implementation)
    urls = list(server.kind_settings.options.get("base_url", ()))
    values = [
        (url_key, "policy_base_url", urls if len(urls) > 1 else "".join(urls)),
        (model_key, "policy_model_name", server.kind_settings.name.partition("/")[2]),
    ]
    if server.kind_settings.options.get("api_key"):
        values.append((api_key_key, "policy_api_key", REDACTED))
    for key, policy_key, value in values:
        own = root.get(*path, key)
        source = (*path, key) if own and own.value else (policy_key,)
        if value:
            yield (*path, key), (value, root.place_of(source), source)


def _get_sort_key(path: KeyPath, deployment: Deployment) -> tuple[int, KeyPath]:
    """Return a sort key: first the head, then single settings, then the servers in their order."""
    names = [server.name for server in deployment.servers]
    if path[0] in names:
        return 2 + names.index(path[0]), path[1:3]
    return (0 if path[0] == "head_server" else 1), path[:1]


def _redact(path: KeyPath, value: Any, secrets: set[str]) -> Any:
    """Return *value* with each part redacted that is secret by its path, or that contains one of *secrets*."""

    def redact(path: KeyPath, part: Any) -> Any:
        if is_secret(path) and part not in ("", None) and not isinstance(part, bool):
            return REDACTED
        return mask_url(redact_url(redact_secrets(part, secrets))) if isinstance(part, str) else part

    return map_values(redact, value, path)


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return *settings*, or the body of a model, with texts redacted that are secret by a key, and credentials in URLs.

    Numbers are kept: a resume compares them, and a key such as `key_count` only looks secret.
    """

    def redact(path: KeyPath, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        # Below `logprobs`, `token` is a text of a model.
        keys = tuple(takewhile("logprobs".__ne__, path))
        return REDACTED if value and is_secret(keys) else mask_url(value)

    # `is_secret` expects the keys of a server above those of its settings.
    return {key: map_values(redact, value, (*[""] * SETTINGS_DEPTH, key)) for key, value in settings.items()}


def redact_words(words: Iterable[str], secrets: Collection[SecretStr] = ()) -> list[str]:
    """Return the arguments of a command with *secrets*, settings that are secret by their keys, and logins redacted."""
    return [_redact_word(redact(word, secrets)) for word in words]


def _redact_word(word: str) -> str:
    head, equals, value = word.partition("=")
    if head.startswith("--") and "=" in value:
        # As in --set=KEY=VALUE.
        return f"{head}={_redact_word(value)}"
    key = head.lstrip("-+~")
    if not equals or not key or mask_url(head) != head:
        return mask_url(word)
    if is_secret((*[""] * SETTINGS_DEPTH, *key.split("."))):
        return f"{head}={REDACTED}"
    try:
        parsed = json.loads(value) if value[:1] in {"[", "{"} else value
    except (ValueError, RecursionError):
        # Hydra's form of a mapping is YAML; which part of it is secret is not known.
        return f"{head}={REDACTED}"
    redacted = redact_settings({key: parsed})[key]
    return f"{head}={redacted if isinstance(redacted, str) else value if redacted == parsed else json.dumps(redacted)}"


def _format_value(value: Any) -> str:
    """Return *value* as YAML in one line."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./-]*", value):
        is_reserved = value.lower() in {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
        return f'"{value}"' if is_reserved else value
    return json.dumps(value, ensure_ascii=False, default=str)
