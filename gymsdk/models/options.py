"""How models are reached: options given, then environment variables, then `env.yaml` and `.env.yaml`."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from gymsdk import errors
from gymsdk.errors import BadModelOption, format_suggestion
from gymsdk.http import tls
from gymsdk.responses import Api, ReasoningFormat

ENV_FILES = ("env.yaml", ".env.yaml")
"""What is read of the working folder though nobody names it: no function such as `oc.env` is run in them."""

INTERPOLATION_MARK = "${"
REFERENCE_PATTERN = re.compile(r"\$\{\s*([\w-]+(?:\.[\w-]+|\[\w+\])*)\s*\}")
MAX_ANSWER_BYTES = 64 * 2**20
"""Bytes that one answer of a model may have: 65,536 tokens with their ids and log-probabilities take about 10 MiB."""

PROVIDERS = ("scripted", "openai", "vllm", "endpoint")
"""What the names of models begin with: `provider/name`."""

ENVIRONMENT_VARIABLES = {
    "policy_base_url": "GYMSDK_BASE_URL",
    "policy_api_key": "GYMSDK_API_KEY",
    "policy_model_name": "GYMSDK_MODEL",
}


def _address(base_url: str) -> str:
    if not re.match(r"https?://[^/\s]+", base_url):
        raise ValueError("write it as http://HOST:PORT/v1")
    if "@" in base_url.split("/")[2]:
        raise ValueError(
            "leave user and password out of it; a key goes into GYMSDK_API_KEY, or policy_api_key in env.yaml"
        )
    # Whoever copies the address of a call gets one path too many.
    path = next((path for path in ("/chat/completions", "/responses") if base_url.rstrip("/").endswith(path)), None)
    if path:
        raise ValueError(f"leave {path} out of it; it usually ends in /v1")
    return base_url


def _sendable(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("input", "messages", "stream", "tools"):
        if key in given:
            raise ValueError(f"{key!r} is the caller's to say")
    return given


def _several(given: object) -> object:
    if isinstance(given, str) or (isinstance(given, (list, tuple)) and all(isinstance(each, str) for each in given)):
        return tls.split_addresses(given) or None
    return given


class ModelOptions(BaseModel):
    """How a model is reached, and what goes with every call; the rest travels in the request.

    *base_url* is one address or several, of servers that all serve the model. *timeout* seconds bound a call with all
    its *retries*; *wait* is the pause before the first of them. An answer may have *max_answer* bytes after
    decompression. A server that stands *apart* was named for this one
    model: no key that was set for the policy goes there. *headers* go with every call and are told to nobody.

    What is *pinned* is set last and wins over the caller; null leaves a key out. *extra_body* is what the caller may
    still replace, *chat_template_kwargs* what a request's metadata may add to. *tokens* asks for token ids and
    log-probabilities. `None` leaves an option to the provider.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: Annotated[tuple[Annotated[str, AfterValidator(_address)], ...] | None, BeforeValidator(_several)] = None
    api_key: SecretStr | None = None
    apart: bool = False
    api: Api | None = None
    timeout: float = Field(600.0, gt=0)
    retries: int = Field(4, ge=0)
    wait: float = Field(0.5, ge=0)
    max_answer: int = Field(MAX_ANSWER_BYTES, ge=1024)
    thoughts: ReasoningFormat | None = None
    pinned: Annotated[Mapping[str, Any], AfterValidator(_sendable)] = {}
    extra_body: Annotated[Mapping[str, Any], AfterValidator(_sendable)] = {}
    chat_template_kwargs: Mapping[str, Any] = {}
    headers: Mapping[str, SecretStr] = {}
    tokens: bool = False

    def __hash__(self) -> int:
        # Objects of JSON have no hash of their own; what differs in them alone is told apart by comparing.
        return hash((self.base_url, self.api_key, self.api, self.timeout, self.retries))


class PolicySettings(BaseModel):
    """The folder's policy endpoint; several addresses are one text, separated by commas."""

    model_config = ConfigDict(frozen=True)

    policy_base_url: str | None = None
    policy_api_key: SecretStr | None = None
    policy_model_name: str | None = None


def load_policy_settings(folder: Path | None = None) -> PolicySettings:
    """The policy's settings: environment variables, then the files of *folder*, by default the current one.

    The key has the source of the base URL, so that neither a folder nor a variable is given the other's.
    """
    ours, theirs = read_policy_variables(), _files(folder or Path.cwd())
    merged = theirs.model_copy(update={key: value for key, value in ours if value})
    if not merged.policy_base_url:
        return merged
    source = ours if ours.policy_base_url else theirs
    return merged.model_copy(update={"policy_api_key": source.policy_api_key})


def find_references(text: str) -> list[str] | None:
    """Give the keys that *text* refers to as `${key}`; `None` if any `${…}` in it is more than a key's path.

    More would be a function (`${oc.env:NAME}`), a relative path, or a reference within a reference, whose parts may
    spell a function.
    """
    found = []
    for mark in re.finditer(r"(\\*)\$\{", text):
        if len(mark[1]) % 2:
            # It is escaped, and so plain text.
            continue
        plain = REFERENCE_PATTERN.match(text, mark.end(1))
        if plain is None:
            return None
        found.append(plain[1])
    return found


def read_policy_variables() -> PolicySettings:
    """The policy's settings as far as environment variables give them."""
    return PolicySettings.model_validate(
        {key: os.environ.get(variable) or None for key, variable in ENVIRONMENT_VARIABLES.items()}
    )


def validate_options(name: str, given: Mapping[str, Any]) -> ModelOptions:
    """The options *given* for the model *name*; raises `BadModelOption` that says which is wrong."""
    try:
        return ModelOptions.model_validate(given)
    except ValidationError as error:
        # Only the first complaint, and never the value: it may be the key.
        complaint = error.errors(include_input=False, include_url=False)[0]
        option = str(complaint["loc"][0])
        hint = "" if option in ModelOptions.model_fields else format_suggestion(option, ModelOptions.model_fields)
        message = errors.format_error_detail(complaint)
        wrong = BadModelOption(f"option {option!r} of {name}: {message}{hint}")
        wrong.setting_errors = (((option,), message),)
        raise wrong from None


def resolve_endpoint(name: str, given: ModelOptions) -> ModelOptions:
    """Give the options *given* for the model *name*, base URL and key filled in from the settings."""
    found = PolicySettings() if given.apart else read_policy_variables() if given.base_url else load_policy_settings()
    base_url = given.base_url or found.policy_base_url
    if not base_url:
        raise BadModelOption(
            f"{name} needs a base URL: give base_url (--base-url http://HOST:PORT/v1), write "
            f"{name}@http://HOST:PORT/v1, or set GYMSDK_BASE_URL, or policy_base_url in env.yaml"
        )
    key = given.api_key or found.policy_api_key
    return validate_options(name, given.model_dump() | {"base_url": base_url, "api_key": key})


def resolve_model_name(provider: str, name: str) -> str:
    """Give *name*, or the settings' model name where it is empty."""
    if known := name or load_policy_settings().policy_model_name:
        return known
    raise BadModelOption(
        f"{provider} needs the model's name: write {provider}/NAME, or set GYMSDK_MODEL, "
        f"or policy_model_name in env.yaml"
    )


def _files(folder: Path) -> PolicySettings:
    found: dict[str, str] = {}
    for name in ENV_FILES:
        found |= _read(folder / name)
    return PolicySettings.model_validate(found)


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    found = _policy(path)
    if "policy_api_key" in found and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logging.getLogger(__name__).warning("%s holds a key that others can read; run: chmod 600 %s", path, path)
    return found


def _policy(path: Path) -> dict[str, str]:
    """Give the three keys of the file at *path*; other programs' keys in it need not even resolve here.

    Nobody named the file, so that no function such as `oc.env` is run in it: an address in it could carry any
    environment variable away.

    Raises:
        BadModelOption: The file cannot be read, or one of the three keys has no plain value.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise BadModelOption(f"{path} must hold `key: value` lines, as in policy_base_url: http://HOST:PORT/v1")
        present = [key for key in ENVIRONMENT_VARIABLES if key in config and not OmegaConf.is_missing(config, key)]
        config = OmegaConf.create(_without_functions(OmegaConf.to_container(config)))
        return {key: _text(path, key, value) for key in present if (value := _resolved(config, key, path)) is not None}
    except YAMLError as error:
        # The parser's own message may quote the line, and with it the key.
        mark = getattr(error, "problem_mark", None)
        raise BadModelOption(f"{path} is no YAML{f' at line {mark.line + 1}' if mark else ''}; correct it") from None
    except OmegaConfBaseException as error:
        raise BadModelOption(f"{path} has a value that does not resolve: {str(error).splitlines()[0]}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelOption(f"{path} cannot be read: {error}") from error


def _resolved(config: Any, key: str, path: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

    try:
        value = config[key]
        return (
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value
        )
    except (InterpolationToMissingValueError, MissingMandatoryValue):
        raise _calls(path, key) from None


def _without_functions(value: Any) -> Any:
    """Give *value* with `???` in place of every text that is more than plain text and references."""
    if isinstance(value, dict):
        return {key: _without_functions(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_functions(each) for each in value]
    return "???" if isinstance(value, str) and find_references(value) is None else value


def _calls(path: Path, key: str) -> BadModelOption:
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if text.lstrip("'\"").startswith(key)), None)
    return BadModelOption(
        f"{path}{f':{line}' if line else ''}: {key} uses a function such as ${{oc.env:…}}, or refers to a value that"
        " does; gymsdk does not run functions in a file it found in the working folder; set the variable"
        f" {ENVIRONMENT_VARIABLES[key]} instead, or write the value itself; gymsdk serve --config {path.name}"
        " runs them, as you named the file"
    )


def _text(path: Path, key: str, value: Any) -> str:
    if isinstance(value, (str, int)):
        return str(value)
    # Trainers name a server for each of their replicas.
    if key == "policy_base_url" and isinstance(value, Sequence) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    raise BadModelOption(f"{key} in {path} must be one text, not {type(value).__name__}")
