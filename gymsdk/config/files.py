"""Read configuration files and the files that they include, and build NeMo Gym's own files that are not on disk."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gymsdk.config import untrusted, yaml
from gymsdk.config.model import (
    AGENTS,
    ENVIRONMENTS,
    IMPLEMENTATIONS,
    MODELS,
    POLICY_SERVER,
    RESOURCES,
    UNSUPPORTED_MODEL_SERVERS,
    normalize_keys,
)
from gymsdk.config.resolve import expand_variables
from gymsdk.config.yaml import Node, Place, Problems
from gymsdk.errors import BadConfig, format_suggestion

INCLUDE_KEY = "config_paths"

BUILTIN_PATH_PATTERN = re.compile(
    rf"(?:.*/)?(?P<kind>{RESOURCES}|{AGENTS}|{MODELS}|{ENVIRONMENTS})/(?P<name>[^/]+)/(?:configs/)?(?P<file>[^/]+)\.ya?ml"
)
"""The path of one of NeMo Gym's configuration files, in any checkout."""

ENDPOINT_KEYS = {"openai_model": ("openai_base_url", "openai_api_key", "openai_model")}
DEFAULT_ENDPOINT_KEYS = ("base_url", "api_key", "model")
TRAINING_SUFFIX = "_for_training"

FILES_WITHOUT_JUDGE = {
    name: (name, "dapo17k", "bytedtsinghua_dapo17k") for name in ("library_judge_math", "math_with_judge")
}
"""For resources servers that can use a judge, the files in which NeMo Gym does not use one, as in our text."""

RESOURCES_TEXT = """\
{name}:
  resources_servers:
    {name}:
      entrypoint: app.py
{name}_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: {name}}}
      model_server: {{type: responses_api_models, name: policy_model}}
"""
SERVER_TEXT = """\
{name}:
  {kind}:
    {name}:
      entrypoint: app.py
"""
MODEL_TEXT = """\
{policy}:
  responses_api_models:
    {name}:
      entrypoint: app.py
      {base_url}: ${{policy_base_url}}
      {api_key}: ${{policy_api_key}}
      {model}: ${{policy_model_name}}
"""


class FileLoader:
    """Loads the files of one configuration; each file counts once, after the files that it includes.

    Args:
        folder: The folder in which relative paths are looked up.
        problems: Receives the errors.
    """

    def __init__(self, folder: Path, problems: Problems) -> None:
        self._folder = folder
        self._problems = problems
        self._loaded: set[str] = set()
        self._open: dict[str, str] = {}

    def load_files(
        self, entries: Sequence[tuple[str, Place]], beside: Path | None = None, *, found: bool = False
    ) -> Iterator[Node]:
        """Yield the settings of each of *entries* in order, each after the files that it includes.

        Args:
            entries: Paths, or names of built-in files, each with the place that names it.
            beside: The folder of the including file, where its entries are looked up first.
            found: Whether the user did not name these files; the places of their nodes then say so.
        """
        for entry, place in entries:
            try:
                yield from self._load_entry(entry, place, beside, found=found)
            except BadConfig as error:
                self._problems.add_error(error)

    def load_file(self, path: Path, *, found: bool = False) -> Iterator[Node]:
        """Yield the settings of the file at *path* if it exists; *found* as for `load_files`."""
        if path.is_file():
            yield from self.load_files([(str(path), Place(source=self._shorten(path)))], found=found)

    def _load_entry(self, entry: str, place: Place, beside: Path | None, *, found: bool) -> Iterator[Node]:
        folders = [beside, self._folder] if beside else [self._folder]
        path = next((path for folder in folders if (path := folder / entry).is_file()), None)
        text = self._get_builtin(entry, place, folders) if path is None else _read_text(path, self._shorten(path))
        source = f"built-in {entry}" if path is None else self._shorten(path)
        identity = entry if path is None else str(path.resolve())
        if identity in self._open:
            cycle = [*self._open.values()][[*self._open].index(identity) :]
            chain = " includes ".join([*cycle, source])
            raise BadConfig(f"{place}: {chain}; take one of them out of config_paths")
        if identity in self._loaded:
            return
        self._loaded.add(identity)
        self._open[identity] = source
        try:
            root = _check_mapping(yaml.parse_yaml(text, source))
            root = root.mark_found() if found else root
            includes = read_includes(root, self._problems)
            yield from self.load_files(includes, path.parent if path else None, found=found)
        finally:
            del self._open[identity]
        yield normalize_keys(root.without(INCLUDE_KEY))

    def _get_builtin(self, entry: str, place: Place, folders: Iterable[Path]) -> str:
        try:
            text = build_builtin_file(entry)
        except BadConfig as error:
            raise BadConfig(f"{place}: {entry}: {error}") from None
        if text is not None:
            return text
        if any((folder / entry).is_dir() for folder in folders):
            raise BadConfig(f"{place}: {entry} is a folder; name a file in it")
        present = [each.name for pattern in ("*.yaml", "*.yml") for each in self._folder.glob(pattern)]
        hint = format_suggestion(
            entry, present, "a path is looked up beside the file that names it, then in the folder"
        )
        raise BadConfig(f"{place}: there is no file {entry}{hint}")

    def _shorten(self, path: Path) -> str:
        """Return *path* relative to the folder, if it is inside."""
        try:
            return str(path.resolve().relative_to(self._folder.resolve()))
        except ValueError:
            return str(path)


def read_includes(root: Node, problems: Problems) -> list[tuple[str, Place]]:
    """Return the files that *root* includes, each with its place."""
    node = root.get(INCLUDE_KEY)
    if node is None or node.value is None:
        return []
    reference_problems = Problems()
    untrusted.check_untrusted_references(node, (INCLUDE_KEY,), node, reference_problems)
    if reference_problems:
        problems.merge(reference_problems)
        return []
    given = node.value if isinstance(node.value, list) else [node]
    entries = [(expand_variables(each.value), each.place) for each in given if isinstance(each.value, str)]
    if len(entries) < len(given):
        problems.add(node.place, "config_paths must be a list of files, as in config_paths: [a.yaml, b.yaml]")
    return [(entry.strip(), place) for entry, place in entries if entry.strip()]


def is_readable_by_others(path: Path) -> bool:
    """Whether users other than its owner may read the file at *path*."""
    return path.is_file() and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _check_mapping(root: Node) -> Node:
    if root.value is None:
        return Node({}, root.place)
    if root.is_mapping:
        return root
    raise BadConfig(f"{root.place}: a configuration must hold `key: value` lines, as in default_host: 127.0.0.1")


def _read_text(path: Path, name: str) -> str:
    data = b""
    try:
        data = path.read_bytes()
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadConfig(f"{name}:{line}: this cannot be read ({type(error).__name__}); give UTF-8 text") from None
    except OSError as error:
        raise BadConfig(f"{name}: this cannot be read ({error.strerror}); give a file of UTF-8 text") from None


def build_builtin_file(entry: str) -> str | None:
    """Return the text of NeMo Gym's configuration file at the path *entry*, `None` if it is no such path.

    Raises:
        BadConfig: gymsdk has no equivalent of the file.
    """
    found = BUILTIN_PATH_PATTERN.fullmatch(entry)
    if found is None:
        return None
    kind, name, file = found["kind"], found["name"], found["file"]
    if kind == RESOURCES:
        return _build_resources_file(name, file)
    return _build_model_file(name, file) if kind == MODELS else _build_server_file(kind, name)


def _build_resources_file(name: str, file: str) -> str:
    files = FILES_WITHOUT_JUDGE.get(name)
    if files is not None and file not in files:
        raise BadConfig(
            f"{name} has no built-in file {file}.yaml, because that file may use a judge; put the file there, or name "
            f"{name}.yaml and set {name}.{name}.judge=PROVIDER/NAME"
        )
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
        raise BadConfig(f"{name!r} is not a valid name of an environment")
    return RESOURCES_TEXT.format(name=name)


def _build_server_file(kind: str, name: str) -> str:
    known = IMPLEMENTATIONS[AGENTS if kind == AGENTS else ENVIRONMENTS]
    if name in known:
        return SERVER_TEXT.format(kind=kind, name=name)
    what = "agent" if kind == AGENTS else "environment server"
    hint = format_suggestion(name, known, f"there are {', '.join(known)}")
    raise BadConfig(f"there is no {what} {name!r} here{hint}")


def _build_model_file(name: str, file: str) -> str:
    if name in UNSUPPORTED_MODEL_SERVERS:
        raise BadConfig(f"{name} has no equivalent in gymsdk; {UNSUPPORTED_MODEL_SERVERS[name]}")
    known = tuple(each for each in IMPLEMENTATIONS[MODELS] if each != "gymsdk_model")
    if name not in known:
        hint = format_suggestion(name, known, f"there are {', '.join(known)}")
        raise BadConfig(f"there is no model server {name!r} here{hint}")
    if file.removesuffix(TRAINING_SUFFIX) != name:
        files = (name, f"{name}{TRAINING_SUFFIX}")
        hint = format_suggestion(file, files, f"there are {', '.join(files)}")
        raise BadConfig(f"{name} has no file {file}.yaml here{hint}")
    base_url, api_key, model = ENDPOINT_KEYS.get(name, DEFAULT_ENDPOINT_KEYS)
    text = MODEL_TEXT.format(policy=POLICY_SERVER, name=name, base_url=base_url, api_key=api_key, model=model)
    return text + "      return_token_id_information: true\n" * file.endswith(TRAINING_SUFFIX)
