"""Translate the settings of model servers and judges to ours, and reject NeMo Gym's settings without an equivalent.

A setting without an equivalent that changes rewards is an error: ignoring it would produce rewards that NeMo Gym would
not give for the same file. Other such settings are ignored with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr, TypeAdapter, ValidationError

from gymsdk.config.fields import (
    ENDPOINT_OPTIONS,
    MODEL_OPTIONS,
    OVERFLOW_KEY,
    TRANSLATED_KEYS,
    get_endpoint_keys,
)
from gymsdk.config.model import ModelServerConfig, PolicyConfig
from gymsdk.config.yaml import KeyPath, Place, Problems, Scalar, YamlNode, format_key_path, to_plain
from gymsdk.errors import BadModelOption, describe_value, format_suggestion
from gymsdk.http import tls
from gymsdk.models.options import ENVIRONMENT_VARIABLES, validate_options
from gymsdk.plugins import registry
from gymsdk.responses import ReasoningFormat

BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
"""The truth values of texts, which environment variables provide; YAML already parses those in files."""

USE_JUDGE_KEY, JUDGE_SERVER_KEY = "should_use_judge", "judge_model_server"
JUDGE_PARAMS_KEY = "judge_responses_create_params"
"""NeMo Gym's settings of a judge."""

JUDGE_SETTING, JUDGE_OPTIONS_SETTING = "judge", "judge_options"
"""The settings of our environments for the model of a judge and the parameters of its requests."""


def read_model_server(
    implementation: str, node: YamlNode, policy: PolicyConfig, path: KeyPath, problems: Problems
) -> ModelServerConfig | None:
    """Return the arguments of `gymsdk.model` for a model server, `None` after an error.

    Args:
        node: The settings of the server.
        policy: The endpoint for a server that names none.
        problems: Receives the errors.
    """
    reader = _ModelServerReader(implementation, node, policy, path, problems)
    config = reader.read_gymsdk_model() if implementation == "gymsdk_model" else reader.read_nemo_model()
    if config is None:
        return None
    try:
        validate_options(config.name, config.options)
    except BadModelOption as error:
        problems.add(_find_option_place(implementation, node, error), f"{format_key_path(path)}: {error}")
        return None
    return config


def _find_option_place(implementation: str, node: YamlNode, error: BadModelOption) -> Place:
    """Return the place of the option that *error* is about, under the key that it has in *node*."""
    options = [option_path[0] for option_path, _ in error.setting_errors]
    keys = {option: key for key, option in MODEL_OPTIONS[implementation].items() if key in node.children}
    return node.place_of(tuple(keys.get(option, option) for option in options))


class _ModelServerReader:
    """Reads the settings of one model server."""

    def __init__(
        self, implementation: str, node: YamlNode, policy: PolicyConfig, path: KeyPath, problems: Problems
    ) -> None:
        self._implementation = implementation
        self._values: dict[str, Any] = {key: value for key, value in to_plain(node).items() if value not in (None, "")}
        self._node = node
        self._policy = policy
        self._path = path
        self._problems = problems
        self._url_key, self._api_key_key, self._model_key = get_endpoint_keys(implementation)

    def read_gymsdk_model(self) -> ModelServerConfig | None:
        """Return the configuration of a `gymsdk_model`, whose model is named `provider/name`."""
        name = str(self._values.get("model", "scripted/oracle"))
        provider, _, rest = name.partition("/")
        entry = registry.find_entry(registry.MODELS, provider)
        if entry is None:
            self._report_unknown_provider(provider)
            return None
        if provider == "scripted":
            # A scripted policy has no endpoint and gets no key.
            return ModelServerConfig(name=name, options=self._collect_options())
        if not rest:
            rest = self._get_model_name() or ""
        base_urls = self._get_base_urls()
        knows_address = base_urls is None and entry.distribution != registry.OWN_DISTRIBUTION
        if "@http" in rest or knows_address:
            # The name contains an address, or the provider of another distribution knows one; the policy's key must
            # not go there.
            key = self._values.get(self._api_key_key)
            key_option = {"api_key": SecretStr(str(key))} if key else {}
            return ModelServerConfig(name=f"{provider}/{rest}", options=key_option | self._collect_options())
        if base_urls is None and provider != "openai":
            self._report_missing("base URL", self._url_key, "policy_base_url")
            return None
        if not rest:
            return None
        options = self._build_endpoint(base_urls or ()) | self._collect_options()
        return ModelServerConfig(name=f"{provider}/{rest}", options=options)

    def read_nemo_model(self) -> ModelServerConfig | None:
        """Return the configuration of one of NeMo Gym's model servers."""
        name, base_urls = self._get_model_name(), self._get_base_urls()
        is_openai = self._implementation == "openai_model"
        if base_urls is None and not is_openai:
            self._report_missing("base URL", self._url_key, "policy_base_url")
        if name is None or (base_urls is None and not is_openai):
            return None
        urls = base_urls or ()
        api = {"api": "responses"} if self._get_bool("is_responses_native") else {}
        options = self._build_endpoint(urls) | self._translate_options() | self._collect_options() | api
        if not is_openai:
            return ModelServerConfig(name=f"vllm/{name}", options=options)
        if all(url.startswith("https://api.openai.com/") for url in urls):
            return ModelServerConfig(name=f"openai/{name}", options=options)
        # Other servers are queried as NeMo Gym does, which needs no SDK.
        return ModelServerConfig(name=f"endpoint/{name}", options={"api": "responses"} | options)

    def _get_model_name(self) -> str | None:
        name = self._values.get(self._model_key) if self._implementation != "gymsdk_model" else None
        if name := name or self._policy.model_name:
            return str(name)
        self._report_missing("model's name", self._model_key, "policy_model_name")
        return None

    def _get_base_urls(self) -> tuple[str, ...] | None:
        """Return the base URLs of the server, else those of the policy, `None` if there are none."""
        own = self._values.get(self._url_key)
        return (normalize_base_urls(own) if own is not None else ()) or self._policy.base_urls or None

    def _build_endpoint(self, base_urls: tuple[str, ...]) -> dict[str, Any]:
        """Return the options for base URLs and key; only the policy's servers receive the policy's key."""
        own_key = self._values.get(self._api_key_key)
        is_policy = not base_urls or set(base_urls) <= set(self._policy.base_urls)
        key = SecretStr(str(own_key)) if own_key else self._policy.api_key if is_policy else None
        endpoint = {"base_url": base_urls, "apart": True} if base_urls else {}
        return endpoint | ({"api_key": key} if key else {})

    def _translate_options(self) -> dict[str, Any]:
        """Return the options for NeMo Gym's keys with translated values."""
        attempts, thoughts = self._values.get("max_http_attempts"), self._get_thoughts()
        # A value that is not an integer is reported as an invalid `retries`.
        retries = attempts - 1 if isinstance(attempts, int) else attempts
        return ({} if retries is None else {"retries": retries}) | ({"thoughts": thoughts} if thoughts else {})

    def _get_thoughts(self) -> ReasoningFormat | None:
        """Return how to send earlier reasoning back to the model, `None` if the server does not say."""
        if self._implementation == "openai_model":
            return "drop" if self._get_bool("drop_input_reasoning_items") else None
        # Without a reasoning parser, the engine receives the text that it generated.
        keeps_text = self._get_bool("preserve_reasoning_in_assistant_content")
        if keeps_text or self._get_bool("uses_reasoning_parser") is False:
            return "tags"
        return "drop" if self._get_bool("uses_interleaved_reasoning") is False else None

    def _get_bool(self, key: str) -> bool | None:
        """Return the truth value under *key*, which may be the text of a variable; `None` if there is none."""
        return BOOLEAN_WORDS.get(str(self._values.get(key)).lower())

    def _collect_options(self) -> dict[str, Any]:
        """Return the options that need no translation of values."""
        options: dict[str, Any] = {}
        for key, value in self._values.items():
            name = MODEL_OPTIONS[self._implementation].get(key)
            has_effect = value not in ({}, False) or name == OVERFLOW_KEY
            is_option = name not in {None, *ENDPOINT_OPTIONS} and key not in TRANSLATED_KEYS
            if name and is_option and has_effect:
                options[name] = self._read_headers(key, value) if name == "headers" else value
        return options

    def _read_headers(self, key: str, value: object) -> object:
        """Return the headers under *key* without those of null; the rest of the values are texts or numbers."""
        if not isinstance(value, dict):
            return value
        headers = {}
        for name, text in value.items():
            if isinstance(text, (dict, list)):
                place = self._node.place_of((key, name))
                path = format_key_path((*self._path, key))
                self._problems.add(place, f"{path}: the value of a header should be a text, not {describe_value(text)}")
            elif text is not None:
                headers[name] = SecretStr(str(text))
        return headers

    def _report_unknown_provider(self, provider: str) -> None:
        providers = [entry.name for entry in registry.list_entries(registry.MODELS)]
        known = ", ".join(f"{provider}/NAME" for provider in providers)
        hint = format_suggestion(provider, providers, f"a model is one of {known}")
        name = format_key_path((*self._path, "model"))
        self._problems.add(self._node.place_of(("model",)), f"{name}: there is no provider {provider!r}{hint}")

    def _report_missing(self, what: str, key: str, policy_key: str) -> None:
        self._problems.add(
            self._node.place,
            f"{format_key_path(self._path)} needs the {what}: give {key} there, or {policy_key} "
            f"(in env.yaml, as {policy_key}=…, or as {ENVIRONMENT_VARIABLES[policy_key]})",
        )


def normalize_base_urls(given: object) -> tuple[str, ...]:
    """Return the base URLs in a text or a list, with `/v1` added to those without a path."""
    texts = [str(url) for url in given if url is not None] if isinstance(given, (list, tuple)) else str(given)
    return tuple(
        f"{url.rstrip('/')}/v1" if re.fullmatch(r"https?://[^/]+/?", url) else url for url in tls.split_addresses(texts)
    )


def translate_judge_settings(
    environment: str, path: KeyPath, settings: YamlNode, models: Mapping[str, str], problems: Problems
) -> tuple[YamlNode, dict[str, str]]:
    """Translate NeMo Gym's settings of a judge to those of *environment*.

    In NeMo Gym, `should_use_judge` is true by default, so a server that names a judge and sets nothing else uses the
    judge.

    Args:
        settings: The settings, without references to other servers.
        models: The model server that each setting refers to.
        problems: Receives the errors, for example if a judge is required but not named.

    Returns:
        The settings and the references to model servers, both under the keys of our environment.
    """
    # No other environment of ours can use a judge.
    if environment != "math":
        return settings, dict(models)
    rest = settings.without(USE_JUDGE_KEY, JUDGE_SERVER_KEY, JUDGE_PARAMS_KEY)
    others = {key: name for key, name in models.items() if key != JUDGE_SERVER_KEY}
    required = _is_judge_required(path, settings, problems)
    if required is False:
        others.pop(JUDGE_SETTING, None)
        return rest.without(JUDGE_SETTING, JUDGE_OPTIONS_SETTING), others
    server = models.get(JUDGE_SERVER_KEY)
    has_own_judge = JUDGE_SETTING in rest.children or JUDGE_SETTING in others
    name = format_key_path(path)
    if required and server is None and not has_own_judge:
        problems.add(
            settings.place_of((USE_JUDGE_KEY,)),
            f"{name}.{USE_JUDGE_KEY} is true, but no judge is named; write {JUDGE_SERVER_KEY}: "
            f"{{type: responses_api_models, name: NAME}} to name a model server, or {USE_JUDGE_KEY}: false",
        )
    if server is not None and has_own_judge:
        place = rest.place_of((JUDGE_SETTING,))
        problems.add(place, f"{name} has both {JUDGE_SERVER_KEY} and {JUDGE_SETTING}; keep one of them")
    params = settings.get(JUDGE_PARAMS_KEY)
    if params is not None and params.is_mapping and JUDGE_OPTIONS_SETTING not in rest.children:
        # NeMo Gym also replaces this input with the messages to the judge.
        rest = rest.with_key(JUDGE_OPTIONS_SETTING, params.without("input"))
    return rest, others if server is None else {**others, JUDGE_SETTING: server}


def _is_judge_required(path: KeyPath, settings: YamlNode, problems: Problems) -> bool | None:
    """Return the value of `should_use_judge`, `None` if it is not set or invalid."""
    node = settings.get(USE_JUDGE_KEY)
    if node is None or node.value is None:
        return None
    try:
        return TypeAdapter(bool).validate_python(node.value)
    except ValidationError:
        problems.add(node.place, f"{format_key_path((*path, USE_JUDGE_KEY))}: input should be true or false")
        return None


@dataclass(frozen=True, slots=True)
class UnsupportedSetting:
    """A setting without an equivalent: the *harmless* value, which has no effect, and *advice* for other values."""

    harmless: Scalar
    advice: str


TOP_LEVEL_SETTINGS: Mapping[str, UnsupportedSetting] = {
    "skip_verification": UnsupportedSetting(harmless=False, advice="every rollout is verified here; leave it out")
}
"""Unsupported settings at the top of a configuration, and of agents."""

IMPLEMENTATION_SETTINGS: Mapping[str, Mapping[str, UnsupportedSetting]] = {
    "simple_agent": {
        **TOP_LEVEL_SETTINGS,
        "execute_tools": UnsupportedSetting(
            harmless=True,
            advice="the agent always runs the tools that the model calls; leave it out, or end the episode with "
            "max_steps: 1",
        ),
    },
    "gymnasium_agent": TOP_LEVEL_SETTINGS,
    "vllm_model": {
        "endpoint_file": UnsupportedSetting(
            harmless=None, advice="write the address that the file holds as base_url; several are a list"
        ),
        "use_completions_api": UnsupportedSetting(
            harmless=False,
            advice="the model is queried with Chat Completions or Responses; start vLLM with --chat-template for a "
            "model without one, and leave it out",
        ),
        "continue_final_assistant_message": UnsupportedSetting(
            harmless=False,
            advice="the model always begins a new turn; leave it out, and end the prompt with a message of the user",
        ),
    },
}
"""Unsupported settings of each implementation."""


def remove_unsupported(
    node: YamlNode, path: KeyPath, settings: Mapping[str, UnsupportedSetting], problems: Problems
) -> YamlNode:
    """Return *node* without the unsupported *settings*; report those whose values have an effect."""
    for key, value in _find_effective(node, settings):
        name = format_key_path((*path, key))
        problems.add(node.children[key].place, f"{name}: {value} is not supported; {settings[key].advice}")
    return node.without(*settings)


def _find_effective(node: YamlNode, settings: Mapping[str, UnsupportedSetting]) -> Iterator[tuple[str, str]]:
    for key, setting in settings.items():
        value = to_plain(node.children[key]) if key in node.children else None
        # `${oc.env:NAME,false}` resolves to a text.
        if value not in (None, "", setting.harmless) and str(value).lower() != str(setting.harmless).lower():
            yield key, str(value).lower() if isinstance(value, bool) else "this value"
