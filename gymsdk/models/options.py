"""Read and check the options of a model: arguments, then environment variables, then `env.yaml` and `.env.yaml`."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from gymsdk import errors
from gymsdk.credentials import BEARER
from gymsdk.errors import BadConfig, BadModelOption, format_name, format_suggestion
from gymsdk.http import tls
from gymsdk.http.backoff import ModelRetry
from gymsdk.responses import Api, ReasoningFormat, TokenInterface
from gymsdk.settings import LIMITS, MODEL, Flag
from gymsdk.working_folder import get_working_folder

DEFAULT_TIMEOUT_SECONDS = 600.0
"""The seconds that one call of a model may take with all its retries, by default."""

ENV_FILES = ("env.yaml", ".env.yaml")
"""The files that are read from the working folder without being named. Their OmegaConf resolvers do not run."""

REQUEST_FIELDS = ("input", "messages", "stream", "tools")
"""Fields of a body that the host sets for each request, and that users cannot set."""

INTERPOLATION_MARK = "${"
REFERENCE_PATTERN = re.compile(r"\$\{\s*([\w-]+(?:\.[\w-]+|\[\w+\])*)\s*\}")

MAX_ANSWER_BYTES = 64 * 2**20
"""The default size limit of one answer; 65,536 tokens with ids and log-probabilities take about 10 MiB."""

ENVIRONMENT_VARIABLES = {
    "policy_base_url": "GYMSDK_BASE_URL",
    "policy_api_key": "GYMSDK_API_KEY",
    "policy_model_name": "GYMSDK_MODEL",
}


def _check_base_url(base_url: str) -> str:
    if not re.match(r"https?://[^/\s]+", base_url):
        raise ValueError("write it as http://HOST:PORT/v1")
    if "@" in base_url.split("/")[2]:
        raise ValueError(
            "leave user and password out of it; a key goes into GYMSDK_API_KEY, or policy_api_key in env.yaml"
        )
    # Users copy the URL of a whole endpoint.
    path = next((path for path in ("/chat/completions", "/responses") if base_url.rstrip("/").endswith(path)), None)
    if path:
        raise ValueError(f"leave {path} out of it; it usually ends in /v1")
    return base_url


def _check_body_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if reserved := next((key for key in REQUEST_FIELDS if key in fields), None):
        raise ValueError(f"{reserved!r} belongs to the request and cannot be an option")
    return fields


def _check_headers(headers: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
    # The characters of a header: RFC 9110, section 5.
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise ValueError(f"{format_name(name)!r} is no name of a header")
        if not re.fullmatch(r"[^\x00-\x08\x0a-\x1f\x7f]*", value.get_secret_value()):
            raise ValueError(f"the value of {format_name(name)!r} has a character that no header may have")
    return headers


def _split_base_urls(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(url, str) for url in value)):
        return tls.split_addresses(value) or None
    return value


class ModelOptions(BaseModel):
    """How to reach a model, and what to add to every call. `None` leaves an option to the provider.

    Attributes:
        api_key: The API key.
        apart: Whether the servers were named for this model only, so that they never receive the policy's key.
        retries: The number of retries of a call.
        wait: The seconds before the first retry.
        max_answer: The size limit of an answer in bytes, after decompression.
        thoughts: How to send earlier reasoning back: `field`, `tags` or `drop`.
        extra_body: Fields of the body that the request may override.
        chat_template_kwargs: Arguments of the chat template, to which the request's metadata may add.
        headers: Headers of every call; their values are secret.
        propagate_context_overflow_errors: Whether the model server answers a prompt that does not fit the context with
            an error; `None` for errors to requests of Messages, and incomplete responses to others.
        tokenizer: A name, a folder, or an object with the methods of `gymsdk.tokens.tokenizer.Tokenizer`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: Annotated[
        tuple[Annotated[str, AfterValidator(_check_base_url)], ...] | None,
        BeforeValidator(_split_base_urls),
        Flag(MODEL, "URL"),
    ] = Field(
        None, description="Call the model server at this address, as in http://127.0.0.1:8000/v1; repeat for replicas."
    )
    api_key: SecretStr | None = None
    apart: bool = False
    api: Annotated[Api | None, Flag(MODEL)] = Field(None, description="Choose the API of the model server.")
    timeout: Annotated[float, Flag(LIMITS, "SECONDS", default=300.0, least=0.001)] = Field(
        DEFAULT_TIMEOUT_SECONDS, gt=0, description="Limit the duration of a model call."
    )
    retries: int = Field(4, ge=0)
    wait: float = Field(0.5, ge=0)
    max_answer: int = Field(MAX_ANSWER_BYTES, ge=1024)
    thoughts: ReasoningFormat | None = None
    pinned: Annotated[Mapping[str, Any], AfterValidator(_check_body_fields), Flag(MODEL, "KEY=VALUE", ("--pin",))] = (
        Field({}, description="Set a key of every request to the model server; null removes the key.")
    )
    extra_body: Annotated[Mapping[str, Any], AfterValidator(_check_body_fields)] = {}
    chat_template_kwargs: Mapping[str, Any] = {}
    headers: Annotated[Mapping[str, SecretStr], AfterValidator(_check_headers)] = {}
    tokens: Annotated[bool, Flag(MODEL, names=("--token-ids",))] = Field(
        False,
        description="Return token ids and log-probabilities for training, and keep conversations on exactly these ids.",
    )
    token_interface: Annotated[TokenInterface | None, Flag(MODEL, shown=False)] = Field(
        None, description="How the model server takes and returns token ids. By default, found out at the first call."
    )
    propagate_context_overflow_errors: bool | None = None
    tokenizer: Annotated[Any, Flag(MODEL, "NAME", takes=str | None, shown=False)] = Field(
        None,
        description="The model's tokenizer, for servers that do not tokenize: a name or a folder for transformers.",
    )

    @property
    def retry(self) -> ModelRetry:
        """How a call is retried."""
        return ModelRetry(times=self.retries, first=self.wait, timeout=self.timeout)

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The key and the values of the headers, also without the word before a bearer token."""
        values = [value.get_secret_value() for value in filter(None, (self.api_key, *self.headers.values()))]
        bare = [value.removeprefix(BEARER) for value in values if value.startswith(BEARER)]
        return tuple(map(SecretStr, (*values, *bare)))

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.token_interface is not None and not self.tokens:
            raise ValueError("token_interface has no effect without tokens; add --token-ids (tokens: true)")
        if self.token_interface == "sglang" and self.tokenizer is None:  # noqa: S105 - the name of an interface
            raise ValueError("SGLang does not render messages; name the model's tokenizer with --tokenizer")
        return self

    def __hash__(self) -> int:
        # The mappings cannot be hashed; options that differ only in them are still unequal.
        return hash((self.base_url, self.api_key, self.api, self.timeout, self.retries))


INTERNAL_OPTIONS = frozenset({"apart", "wait"})
"""The options that no configuration sets."""


class PolicySettings(BaseModel):
    """The policy's endpoint from environment variables or the working folder; base URLs are separated by commas."""

    model_config = ConfigDict(frozen=True)

    policy_base_url: str | None = None
    policy_api_key: SecretStr | None = None
    policy_model_name: str | None = None


def load_policy_settings(folder: Path | None = None) -> PolicySettings:
    """Return the policy's endpoint: environment variables, then the files of *folder*, by default the current one.

    The key comes from the same source as the base URL, so that no server receives the key of another.

    Raises:
        BadModelOption: A file is invalid.
    """
    variables, found = read_policy_variables(), dict[str, str]()
    for name in ENV_FILES:
        found |= _read_env_file((folder or get_working_folder()) / name)
    files = PolicySettings.model_validate(found)
    merged = files.model_copy(update={key: value for key, value in variables if value})
    if not merged.policy_base_url:
        return merged
    source = variables if variables.policy_base_url else files
    return merged.model_copy(update={"policy_api_key": source.policy_api_key})


def read_policy_variables() -> PolicySettings:
    """Return the policy's endpoint as environment variables give it."""
    values = {key: os.environ.get(variable) or None for key, variable in ENVIRONMENT_VARIABLES.items()}
    return PolicySettings.model_validate(values)


def resolve_endpoint(name: str, options: ModelOptions) -> ModelOptions:
    """Return the *options* of the model *name*, with base URL and key from the policy settings if they are missing.

    Raises:
        BadModelOption: There is no base URL.
    """
    if options.apart:
        settings = PolicySettings()
    else:
        settings = read_policy_variables() if options.base_url else load_policy_settings()
    base_url = options.base_url or settings.policy_base_url
    if not base_url:
        shown = format_model_name(name)
        raise BadModelOption(
            f"{shown} needs a base URL: give base_url (--base-url http://HOST:PORT/v1), write "
            f"{shown}@http://HOST:PORT/v1, or set GYMSDK_BASE_URL, or policy_base_url in env.yaml"
        )
    key = options.api_key or settings.policy_api_key
    return validate_options(name, dict(options) | {"base_url": base_url, "api_key": key})


def resolve_model_name(provider: str, name: str) -> str:
    """Return *name*, or the model name of the policy settings if it is empty.

    Raises:
        BadModelOption: There is no name.
    """
    if resolved := name or load_policy_settings().policy_model_name:
        return resolved
    raise BadModelOption(
        f"{provider} needs the model's name: write {provider}/NAME, or set GYMSDK_MODEL, "
        f"or policy_model_name in env.yaml"
    )


def validate_options(name: str, options: Mapping[str, Any]) -> ModelOptions:
    """Return the *options* of the model *name* as `ModelOptions`.

    Raises:
        BadModelOption: An option is unknown or invalid. The message never contains its value, which may be a key.
    """
    try:
        return ModelOptions.model_validate(options)
    except ValidationError as error:
        location, message = errors.list_setting_errors(error)[0]
        # An error without a place is about two options, of which the token interface is one.
        option = location[0] if location else "token_interface"
        hint = "" if option in ModelOptions.model_fields else format_suggestion(option, ModelOptions.model_fields)
        bad_option = BadModelOption(f"option {option!r} of {format_model_name(name)}: {message}{hint}")
        bad_option.setting_errors = (((option,), message),)
        raise bad_option from None


def format_model_name(name: str) -> str:
    """Return the *name* of a model for a message, without what may be an address with a key in it."""
    before, at, after = name.partition("@")
    return f"{before}@…" if at and (":" in after or "/" in after) else name


def find_references(text: str) -> list[str] | None:
    """Return the keys that *text* refers to as `${key}`, `None` if a `${…}` in it is not a plain path of keys.

    Other forms are functions (`${oc.env:NAME}`), relative paths, and nested references, which can build the name of a
    function.
    """
    keys = []
    for mark in re.finditer(r"(\\*)\$\{", text):
        if len(mark[1]) % 2:
            # The mark is escaped.
            continue
        reference = REFERENCE_PATTERN.match(text, mark.end(1))
        if reference is None:
            return None
        keys.append(reference[1])
    return keys


def _read_env_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    values = _read_policy_keys(path)
    if "policy_api_key" in values and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        _warn_of_readable_key(path.absolute())
    return values


@cache
def _warn_of_readable_key(path: Path) -> None:
    """Warn that other users can read the key in the file at *path*, once per process."""
    logging.getLogger(__name__).warning("%s has a key that other users can read; run: chmod 600 %s", path, path)


def _read_policy_keys(path: Path) -> dict[str, str]:
    """Return the policy's three keys in the file at *path*; keys of other programs need not resolve.

    The file was found, not named by the user, so functions such as `oc.env` do not run in it: a base URL could send
    any environment variable to a server.

    Raises:
        BadModelOption: The file cannot be read, or a key has no plain value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from gymsdk.config.yaml import map_values, parse_yaml, to_plain

    try:
        root = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
        if root.value is None:
            return {}
        if not root.is_mapping:
            raise BadModelOption(f"{path} must hold `key: value` lines, as in policy_base_url: http://HOST:PORT/v1")
        # YAML reads some keys and names as numbers or truth values; the text in the file is meant.
        config = OmegaConf.create(to_plain(root.to_text()))
        present = [key for key in ENVIRONMENT_VARIABLES if key in config and not OmegaConf.is_missing(config, key)]
        # `???` is OmegaConf's missing value.
        config = OmegaConf.create(
            map_values(
                lambda _, text: "???" if isinstance(text, str) and find_references(text) is None else text,
                OmegaConf.to_container(config),
            )
        )
        values = {key: _resolve_key(config, key, path) for key in present}
        return {key: _to_text(path, key, value) for key, value in values.items() if value is not None}
    except BadConfig as error:
        raise BadModelOption(str(error)) from None
    except OmegaConfBaseException as error:
        raise BadModelOption(f"{path} has a value that does not resolve ({type(error).__name__})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelOption(f"{path} cannot be read: {error}") from error


def _resolve_key(config: Any, key: str, path: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

    try:
        value = config[key]
        is_config = OmegaConf.is_config(value)
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if is_config else value
    except (InterpolationToMissingValueError, MissingMandatoryValue):
        raise _build_function_error(path, key) from None


def _build_function_error(path: Path, key: str) -> BadModelOption:
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if text.lstrip("'\"").startswith(key)), None)
    return BadModelOption(
        f"{path}{f':{line}' if line else ''}: {key} uses a function such as ${{oc.env:…}}, or refers to a value that"
        " does; gymsdk does not run functions in a file it found in the working folder; set the variable"
        f" {ENVIRONMENT_VARIABLES[key]} instead, or write the value itself; gymsdk serve --config {path.name}"
        " runs them, because you named the file"
    )


def _to_text(path: Path, key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    # Trainers give the URL of each of their replicas.
    if key == "policy_base_url" and isinstance(value, Sequence) and all(isinstance(url, str) for url in value):
        return ",".join(value)
    raise BadModelOption(f"{key} in {path} must be a string, not {type(value).__name__}")
