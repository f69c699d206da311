"""Players: what a model server's block means to `gymsdk.model`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import SecretStr

from gymsdk import addresses
from gymsdk.configuration.deployment import Player, Policy
from gymsdk.configuration.nodes import Node, plain
from gymsdk.configuration.places import Place, Problems, Trail, dotted
from gymsdk.errors import BadModelOption, suggestion
from gymsdk.settings import PROVIDERS, VARIABLES, options
from gymsdk.wire import Thoughts

OPENAI = "https://api.openai.com/"
SAME = (
    "api",
    "timeout",
    "retries",
    "max_answer",
    "thoughts",
    "pinned",
    "extra_body",
    "chat_template_kwargs",
    "headers",
    "tokens",
)
"""Keys that are called so by `gymsdk.model` too."""

RENAMED = {
    "sampling_overrides": "pinned",
    "default_headers": "headers",
    "openai_default_headers": "headers",
    "return_token_id_information": "tokens",
    "max_http_attempts": "retries",
    "drop_input_reasoning_items": "thoughts",
}
"""The option that each of NeMo Gym's keys comes to, where the names differ."""


TRANSLATED = frozenset({"max_http_attempts", "drop_input_reasoning_items"})
"""Keys whose values are translated too."""

SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""What a text says that is a truth value; those of files are read as such already."""


def endpoint(implementation: str) -> tuple[str, str, str]:
    """Give what base URL, key and model are called in a block of *implementation*."""
    if implementation == "openai_model":
        return "openai_base_url", "openai_api_key", "openai_model"
    return "base_url", "api_key", "model"


def player(implementation: str, node: Node, policy: Policy, trail: Trail, problems: Problems) -> Player | None:
    """Give what the block *node* plays with, *policy* where it names no endpoint; `None` where that is not enough."""
    reading = _Reading(implementation, node, policy, trail, problems)
    found = reading.ours() if implementation == "gymsdk_model" else reading.theirs()
    if found is None:
        return None
    try:
        options(found.name, found.options)
    except BadModelOption as error:
        problems.add(_place(implementation, node, error), f"{dotted(trail)}: {error}")
        return None
    return found


def _place(implementation: str, node: Node, error: BadModelOption) -> Place:
    """Give the place of the key that *error* is about, however that is called in *node*."""
    options_ = [way[0] for way, _ in error.setting_errors]
    called = {
        **{option: key for key, option in RENAMED.items() if key in node.children},
        "base_url": endpoint(implementation)[0],
    }
    return node.place_of(tuple(called.get(option, option) for option in options_))


class _Reading:
    """One block of a model server while it is read."""

    def __init__(self, implementation: str, node: Node, policy: Policy, trail: Trail, problems: Problems) -> None:
        self._implementation = implementation
        self._values: dict[str, Any] = {key: value for key, value in plain(node).items() if value not in (None, "")}
        self._node = node
        self._policy = policy
        self._trail = trail
        self._problems = problems
        self._keys = endpoint(implementation)

    def ours(self) -> Player | None:
        """Give the player of a `gymsdk_model`: its model is named `provider/name`."""
        name = str(self._values.get("model", "scripted/oracle"))
        provider, _, rest = name.partition("/")
        if provider not in PROVIDERS:
            self._unknown(provider)
            return None
        if provider == "scripted":
            # It plays here: no endpoint, and no key of one.
            return Player(name=name, options=self._same())
        if not rest:
            rest = self._name() or ""
        if "@http" in rest:
            # It carries an address of its own, where the policy's key has no business.
            own = self._values.get(self._keys[1])
            return Player(name=name, options=({"api_key": SecretStr(str(own))} if own else {}) | self._same())
        base_urls = self._base_urls()
        if base_urls is None and provider != "openai":
            self._absent("base URL", self._keys[0], "policy_base_url")
            return None
        if not rest:
            return None
        return Player(name=f"{provider}/{rest}", options=self._endpoint(base_urls or ()) | self._same())

    def theirs(self) -> Player | None:
        """Give the player of one of NeMo Gym's model servers."""
        name, base_urls = self._name(), self._base_urls()
        hosted = self._implementation == "openai_model"
        if base_urls is None and not hosted:
            self._absent("base URL", self._keys[0], "policy_base_url")
        if name is None or (base_urls is None and not hosted):
            return None
        urls = base_urls or ()
        own = {"api": "responses"} if self._is("is_responses_native") else {}
        given = self._endpoint(urls) | self._translated() | self._same() | own
        if not hosted:
            return Player(name=f"vllm/{name}", options=given)
        if all(url.startswith(OPENAI) for url in urls):
            return Player(name=f"openai/{name}", options=given)
        # A server of somebody else's is asked as NeMo Gym asks it, and needs no SDK.
        return Player(name=f"endpoint/{name}", options={"api": "responses"} | given)

    def _name(self) -> str | None:
        key = self._keys[2]
        found = self._values.get(key) if self._implementation != "gymsdk_model" else None
        if name := found or self._policy.model_name:
            return str(name)
        self._absent("model's name", key, "policy_model_name")
        return None

    def _base_urls(self) -> tuple[str, ...] | None:
        """Give the block's addresses or else the policy's, `None` where neither has one."""
        own = self._values.get(self._keys[0])
        return (urls(own) if own is not None else ()) or self._policy.base_urls or None

    def _endpoint(self, base_urls: tuple[str, ...]) -> dict[str, Any]:
        """Give address and key; a server that is not the policy's is not given the policy's key."""
        own = self._values.get(self._keys[1])
        policys = not base_urls or set(base_urls) <= set(self._policy.base_urls)
        key = SecretStr(str(own)) if own else self._policy.api_key if policys else None
        endpoint = {"base_url": base_urls, "apart": True} if base_urls else {}
        return endpoint | ({"api_key": key} if key else {})

    def _translated(self) -> dict[str, Any]:
        """Give the options that NeMo Gym's keys come to by their values."""
        attempts, thoughts = self._values.get("max_http_attempts"), self._thoughts()
        # An attempt that is no number is told as the option it would be.
        retries = attempts - 1 if isinstance(attempts, int) else attempts
        return ({} if retries is None else {"retries": retries}) | ({"thoughts": thoughts} if thoughts else {})

    def _thoughts(self) -> Thoughts | None:
        """Give how earlier reasoning goes back to the model, `None` where the block does not say."""
        if self._implementation == "openai_model":
            return "drop" if self._is("drop_input_reasoning_items") else None
        # Without a parser of its own, the engine is shown the text that it wrote.
        if self._is("preserve_reasoning_in_assistant_content") or self._is("uses_reasoning_parser") is False:
            return "tags"
        return "drop" if self._is("uses_interleaved_reasoning") is False else None

    def _is(self, key: str) -> bool | None:
        """Give the truth value under *key*, which may be the text of a variable; `None` where there is none."""
        return SWITCH.get(str(self._values.get(key)).lower())

    def _same(self) -> dict[str, Any]:
        return dict(self._options())

    def _options(self) -> Iterator[tuple[str, Any]]:
        for key, value in self._values.items():
            name = RENAMED.get(key, key)
            if key not in TRANSLATED and name in SAME and value not in ({}, False):
                yield name, _hidden(value) if name == "headers" and isinstance(value, dict) else value

    def _unknown(self, provider: str) -> None:
        known = ", ".join(f"{each}/NAME" for each in PROVIDERS)
        near = suggestion(provider, PROVIDERS, f"a model is one of {known}")
        place = self._node.place_of(("model",))
        self._problems.add(place, f"{dotted((*self._trail, 'model'))}: there is no provider {provider!r}{near}")

    def _absent(self, what: str, key: str, setting: str) -> None:
        self._problems.add(
            self._node.place,
            f"{dotted(self._trail)} needs the {what}: give {key} there, or {setting} "
            f"(in env.yaml, as {setting}=…, or as {VARIABLES[setting]})",
        )


def urls(given: object) -> tuple[str, ...]:
    """Give base URLs out of one text or several, each with `/v1` where it has no path."""
    texts = [str(each) for each in given if each is not None] if isinstance(given, (list, tuple)) else str(given)
    return tuple(_completed(each) for each in addresses.several(texts))


def _completed(url: str) -> str:
    return f"{url.rstrip('/')}/v1" if re.fullmatch(r"https?://[^/]+/?", url) else url


def _hidden(headers: dict[str, Any]) -> dict[str, SecretStr]:
    return {name: SecretStr(str(value)) for name, value in headers.items()}
