"""NeMo Gym's settings that change rewards and have no counterpart here: any value that has an effect is an error.

Other settings without a counterpart are ignored with a warning. Ignoring one of these would collect rewards that
NeMo Gym would not give for the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr, TypeAdapter, ValidationError

from gymsdk.config.model import ModelServerConfig, PolicyConfig
from gymsdk.config.yaml import KeyPath, Node, Place, Problems, Scalar, format_key_path, to_plain
from gymsdk.errors import BadModelOption, format_suggestion
from gymsdk.http import tls
from gymsdk.models.options import ENVIRONMENT_VARIABLES, PROVIDERS, validate_options
from gymsdk.responses import ReasoningFormat

OPENAI_URL_PREFIX = "https://api.openai.com/"
UNCHANGED_OPTIONS = (
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

RENAMED_OPTIONS = {
    "sampling_overrides": "pinned",
    "default_headers": "headers",
    "openai_default_headers": "headers",
    "return_token_id_information": "tokens",
    "max_http_attempts": "retries",
    "drop_input_reasoning_items": "thoughts",
}
"""The option that each of NeMo Gym's keys comes to, where the names differ."""


TRANSLATED_KEYS = frozenset({"max_http_attempts", "drop_input_reasoning_items"})
"""Keys whose values are translated too."""

BOOLEAN_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
"""What a text says that is a truth value; those of files are read as such already."""


def get_endpoint_keys(implementation: str) -> tuple[str, str, str]:
    """Give what base URL, key and model are called in a block of *implementation*."""
    if implementation == "openai_model":
        return "openai_base_url", "openai_api_key", "openai_model"
    return "base_url", "api_key", "model"


def read_model_server(
    implementation: str, node: Node, policy: PolicyConfig, trail: KeyPath, problems: Problems
) -> ModelServerConfig | None:
    """Give what the block *node* plays with, *policy* where it names no endpoint; `None` where that is not enough."""
    reading = _Reading(implementation, node, policy, trail, problems)
    found = reading.ours() if implementation == "gymsdk_model" else reading.theirs()
    if found is None:
        return None
    try:
        validate_options(found.name, found.options)
    except BadModelOption as error:
        problems.add(_place(implementation, node, error), f"{format_key_path(trail)}: {error}")
        return None
    return found


def _place(implementation: str, node: Node, error: BadModelOption) -> Place:
    """Give the place of the key that *error* is about, however that is called in *node*."""
    options_ = [way[0] for way, _ in error.setting_errors]
    called = {
        **{option: key for key, option in RENAMED_OPTIONS.items() if key in node.children},
        "base_url": get_endpoint_keys(implementation)[0],
    }
    return node.place_of(tuple(called.get(option, option) for option in options_))


class _Reading:
    """One block of a model server while it is read."""

    def __init__(
        self, implementation: str, node: Node, policy: PolicyConfig, trail: KeyPath, problems: Problems
    ) -> None:
        self._implementation = implementation
        self._values: dict[str, Any] = {key: value for key, value in to_plain(node).items() if value not in (None, "")}
        self._node = node
        self._policy = policy
        self._trail = trail
        self._problems = problems
        self._keys = get_endpoint_keys(implementation)

    def ours(self) -> ModelServerConfig | None:
        """Give the player of a `gymsdk_model`: its model is named `provider/name`."""
        name = str(self._values.get("model", "scripted/oracle"))
        provider, _, rest = name.partition("/")
        if provider not in PROVIDERS:
            self._unknown(provider)
            return None
        if provider == "scripted":
            # It plays here: no endpoint, and no key of one.
            return ModelServerConfig(name=name, options=self._same())
        if not rest:
            rest = self._name() or ""
        if "@http" in rest:
            # It carries an address of its own, where the policy's key has no business.
            own = self._values.get(self._keys[1])
            return ModelServerConfig(
                name=name, options=({"api_key": SecretStr(str(own))} if own else {}) | self._same()
            )
        base_urls = self._base_urls()
        if base_urls is None and provider != "openai":
            self._absent("base URL", self._keys[0], "policy_base_url")
            return None
        if not rest:
            return None
        return ModelServerConfig(name=f"{provider}/{rest}", options=self._endpoint(base_urls or ()) | self._same())

    def theirs(self) -> ModelServerConfig | None:
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
            return ModelServerConfig(name=f"vllm/{name}", options=given)
        if all(url.startswith(OPENAI_URL_PREFIX) for url in urls):
            return ModelServerConfig(name=f"openai/{name}", options=given)
        # A server of somebody else's is asked as NeMo Gym asks it, and needs no SDK.
        return ModelServerConfig(name=f"endpoint/{name}", options={"api": "responses"} | given)

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
        return (normalize_base_urls(own) if own is not None else ()) or self._policy.base_urls or None

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

    def _thoughts(self) -> ReasoningFormat | None:
        """Give how earlier reasoning goes back to the model, `None` where the block does not say."""
        if self._implementation == "openai_model":
            return "drop" if self._is("drop_input_reasoning_items") else None
        # Without a parser of its own, the engine is shown the text that it wrote.
        if self._is("preserve_reasoning_in_assistant_content") or self._is("uses_reasoning_parser") is False:
            return "tags"
        return "drop" if self._is("uses_interleaved_reasoning") is False else None

    def _is(self, key: str) -> bool | None:
        """Give the truth value under *key*, which may be the text of a variable; `None` where there is none."""
        return BOOLEAN_WORDS.get(str(self._values.get(key)).lower())

    def _same(self) -> dict[str, Any]:
        return dict(self._options())

    def _options(self) -> Iterator[tuple[str, Any]]:
        for key, value in self._values.items():
            name = RENAMED_OPTIONS.get(key, key)
            if key not in TRANSLATED_KEYS and name in UNCHANGED_OPTIONS and value not in ({}, False):
                yield name, _hidden(value) if name == "headers" and isinstance(value, dict) else value

    def _unknown(self, provider: str) -> None:
        known = ", ".join(f"{each}/NAME" for each in PROVIDERS)
        near = format_suggestion(provider, PROVIDERS, f"a model is one of {known}")
        place = self._node.place_of(("model",))
        self._problems.add(
            place, f"{format_key_path((*self._trail, 'model'))}: there is no provider {provider!r}{near}"
        )

    def _absent(self, what: str, key: str, setting: str) -> None:
        self._problems.add(
            self._node.place,
            f"{format_key_path(self._trail)} needs the {what}: give {key} there, or {setting} "
            f"(in env.yaml, as {setting}=…, or as {ENVIRONMENT_VARIABLES[setting]})",
        )


def normalize_base_urls(given: object) -> tuple[str, ...]:
    """Give base URLs out of one text or several, each with `/v1` where it has no path."""
    texts = [str(each) for each in given if each is not None] if isinstance(given, (list, tuple)) else str(given)
    return tuple(_completed(each) for each in tls.split_addresses(texts))


def _completed(url: str) -> str:
    return f"{url.rstrip('/')}/v1" if re.fullmatch(r"https?://[^/]+/?", url) else url


def _hidden(headers: dict[str, Any]) -> dict[str, SecretStr]:
    return {name: SecretStr(str(value)) for name, value in headers.items()}


USE_JUDGE_KEY, JUDGE_SERVER_KEY, JUDGE_PARAMS_KEY = (
    "should_use_judge",
    "judge_model_server",
    "judge_responses_create_params",
)
JUDGE_SETTING, JUDGE_OPTIONS_SETTING = "judge", "judge_options"
"""What our environments call the judge's model, and the parameters of its requests."""

JUDGED_ENVIRONMENTS = frozenset({"math"})
"""Our environments that have a judge."""


def translate_judge_settings(
    environment: str, trail: KeyPath, settings: Node, models: Mapping[str, str], problems: Problems
) -> tuple[Node, dict[str, str]]:
    """Translate NeMo Gym's settings of a judge to those of *environment*.

    NeMo Gym's class has `should_use_judge` true by default, so a server that names a judge and says nothing else asks
    the judge. A judge that is required but not named goes to *problems*.

    Args:
        environment: The name of our environment.
        trail: The keys that lead to the server's block.
        settings: The block's settings, without its references to other servers.
        models: The model server that each setting refers to.
        problems: Where errors go.

    Returns:
        The settings and the references to model servers, both in the words of our environment.
    """
    if environment not in JUDGED_ENVIRONMENTS:
        return settings, dict(models)
    rest = settings.without(USE_JUDGE_KEY, JUDGE_SERVER_KEY, JUDGE_PARAMS_KEY)
    others = {key: name for key, name in models.items() if key != JUDGE_SERVER_KEY}
    required = _is_required(trail, settings, problems)
    if required is False:
        others.pop(JUDGE_SETTING, None)
        return rest.without(JUDGE_SETTING, JUDGE_OPTIONS_SETTING), others
    server = models.get(JUDGE_SERVER_KEY)
    own = JUDGE_SETTING in rest.children or JUDGE_SETTING in others
    if required and server is None and not own:
        problems.add(
            settings.place_of((USE_JUDGE_KEY,)),
            f"{format_key_path((*trail, USE_JUDGE_KEY))} is true, and no judge is named; write {JUDGE_SERVER_KEY}: "
            f"{{type: responses_api_models, name: NAME}} to name a model server, or {USE_JUDGE_KEY}: false",
        )
    if server is not None and own:
        problems.add(
            rest.place_of((JUDGE_SETTING,)),
            f"{format_key_path(trail)} has both {JUDGE_SERVER_KEY} and {JUDGE_SETTING}; keep one of them",
        )
    params = settings.get(JUDGE_PARAMS_KEY)
    if params is not None and params.is_mapping and JUDGE_OPTIONS_SETTING not in rest.children:
        # NeMo Gym replaces this input by the messages to the judge, too.
        rest = rest.with_key(JUDGE_OPTIONS_SETTING, params.without("input"))
    return rest, others if server is None else {**others, JUDGE_SETTING: server}


def _is_required(trail: KeyPath, settings: Node, problems: Problems) -> bool | None:
    """Return the value of `should_use_judge`, `None` where it has none or a wrong one, which goes to *problems*."""
    node = settings.get(USE_JUDGE_KEY)
    if node is None or node.value is None:
        return None
    try:
        return TypeAdapter(bool).validate_python(node.value)
    except ValidationError:
        problems.add(node.place, f"{format_key_path((*trail, USE_JUDGE_KEY))}: input should be true or false")
        return None


@dataclass(frozen=True, slots=True)
class UnsupportedSetting:
    """A setting whose value must be *harmless*, the one without an effect; *advice* says what to do instead."""

    harmless: Scalar
    advice: str


_SKIP = UnsupportedSetting(harmless=False, advice="every rollout is verified here; leave it out")

TOP_LEVEL_SETTINGS: Mapping[str, UnsupportedSetting] = {"skip_verification": _SKIP}
"""Settings at the top of a configuration."""

_AGENT = {"skip_verification": _SKIP}

IMPLEMENTATION_SETTINGS: Mapping[str, Mapping[str, UnsupportedSetting]] = {
    "simple_agent": {
        **_AGENT,
        "execute_tools": UnsupportedSetting(
            harmless=True,
            advice="the agent always runs the tools that the model calls; leave it out, or end the episode with "
            "max_steps: 1",
        ),
    },
    "gymnasium_agent": _AGENT,
    "vllm_model": {
        "endpoint_file": UnsupportedSetting(
            harmless=None, advice="write the address that the file holds as base_url; several are a list"
        ),
        "use_completions_api": UnsupportedSetting(
            harmless=False,
            advice="the model is asked in Chat Completions or Responses; start vLLM with --chat-template for a model "
            "that has none, and leave it out",
        ),
        "continue_final_assistant_message": UnsupportedSetting(
            harmless=False, advice="the model always begins a new turn; leave it out, and end the prompt with a user's"
        ),
        "propagate_context_overflow_errors": UnsupportedSetting(
            harmless=False,
            advice="a prompt that is too long gives an incomplete response, which is scored; leave it out",
        ),
    },
}
"""Settings of each implementation."""


def remove_unsupported(
    node: Node, trail: KeyPath, settings: Mapping[str, UnsupportedSetting], problems: Problems
) -> Node:
    """Return *node* without *settings*, and report to *problems* those whose values have an effect."""
    for key, value in _effective(node, settings):
        name = format_key_path((*trail, key))
        problems.add(node.children[key].place, f"{name}: {value} is not supported; {settings[key].advice}")
    return node.without(*settings)


def _effective(node: Node, settings: Mapping[str, UnsupportedSetting]) -> Iterator[tuple[str, str]]:
    for key, setting in settings.items():
        value = to_plain(node.children[key]) if key in node.children else None
        # `${oc.env:NAME,false}` gives the text of a variable.
        if value not in (None, "", setting.harmless) and str(value).lower() != str(setting.harmless).lower():
            yield key, str(value).lower() if isinstance(value, bool) else "this value"
