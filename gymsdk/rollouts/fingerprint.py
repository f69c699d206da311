"""The identity of an environment's code: its files, the files that it imports, its distributions, its variables."""

from __future__ import annotations

import ast
import hashlib
import hmac
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import FunctionType, ModuleType

from gymsdk.errors import BrokenEnvironment
from gymsdk.plugins import registry
from gymsdk.types import Row

DIGEST_CHARS = 16
"""The length of a digest in run.json."""

ADDED_PARTS = ("imports", "distributions", "environ")
"""The parts that runs of earlier versions lack. A resume of such a run does not compare them."""

GRADERS = "gymsdk.graders."
"""The prefix of the modules of gymsdk's graders. Their versions belong to the identity of an environment."""

SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})

ENTRY_POINTS = "entry_points.txt"
"""The only file of a `.dist-info` that decides which code runs.

The others depend on the build backend and on the installer.
"""

_REQUIREMENT_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_EXTRA = re.compile(r";.*\bextra\b")


CODE_PARTS = ("version", "fingerprint", *ADDED_PARTS)
"""The parts of an environment's entry in run.json that identify its code."""


def describe_code(name: str, plugin: object, key: str) -> Row:
    """Return the parts of run.json that identify the code of an environment.

    Args:
        name: The name of the environment.
        plugin: Its plugin.
        key: The key of the run, with which the values of variables are hashed.

    Returns:
        `fingerprint`, the digest of the files of the package; `imports`, the digests of the other files that it
        imports, by module; `distributions`, the versions and digests of its distribution and direct requirements; and
        `environ`, the keyed hashes of the variables that it names, or `None` for a variable that is not set.

    Raises:
        BrokenEnvironment: The plugin's `environ` is not a list of names.
    """
    return {
        "fingerprint": compute_fingerprint(plugin),
        "imports": digest_imports(plugin),
        "distributions": digest_distributions(name),
        "environ": {variable: _hash_variable(variable, key) for variable in read_variable_names(name, plugin)},
    }


def compute_fingerprint(plugin: object) -> str:
    """Return a digest of all files of the package of *plugin*, or of its module; empty if there is no file."""
    return digest_files(_list_own_files(_get_module(plugin)))


def _get_module(plugin: object) -> ModuleType | None:
    return sys.modules.get(getattr(plugin, "__name__", type(plugin).__module__))


def _list_own_files(module: ModuleType | None) -> dict[str, Path]:
    file = getattr(module, "__file__", None)
    if file is None:
        return {}
    module_path = Path(file)
    if module_path.name != "__init__.py":
        return {module_path.name: module_path}
    files = (path for path in module_path.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(module_path.parent)): path for path in sorted(files)}


def digest_files(files: Mapping[str, Path]) -> str:
    """Return the digest of *files* and their names; empty if there is none."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:DIGEST_CHARS]


# Imports


def digest_imports(plugin: object) -> dict[str, str]:
    """Return the digests of the files that *plugin* imports, directly or not, by the name of their module.

    Files of the standard library, of site-packages and of gymsdk are left out, as well as those of the fingerprint. Of
    a grader of gymsdk, the name and version count. The imports are found in the namespaces of the plugin and its
    imports, and in the sources, also in functions.
    """
    module = _get_module(plugin)
    if module is None:
        return {}
    own = _list_own_files(module)
    package = module.__name__ if getattr(module, "__path__", None) else module.__name__.rpartition(".")[0]
    found = _ImportSearch(module.__name__.partition(".")[0])
    found.follow_namespace(module)
    found.follow_sources()
    for relative, path in own.items():
        folders = Path(relative).parent.parts
        found.follow_source(path, ".".join(filter(None, (package, *folders))))
    own_paths = {path.resolve() for path in own.values()}
    files = {name: path for name, path in sorted(found.files.items()) if path.resolve() not in own_paths}
    return {name: digest_files({"": path}) for name, path in files.items()} | found.graders


class _ImportSearch:
    """Follows imports to files outside the standard library and site-packages.

    Args:
        home: The top-level package of the environment. Its files count wherever they are.

    Attributes:
        files: The files by the name of their module.
        graders: The names and versions of gymsdk's graders, by the name of their module.
    """

    def __init__(self, home: str) -> None:
        self.files: dict[str, Path] = {}
        self.graders: dict[str, str] = {}
        self._home = home
        self._bound: set[str] = set()
        self._seen: set[str] = set()
        self._stdlib = tuple(
            Path(folder).resolve() for kind in ("stdlib", "platstdlib") if (folder := sysconfig.get_path(kind))
        )

    def follow_namespace(self, module: ModuleType) -> None:
        """Follow the modules, and the modules of the functions, classes and objects, in the namespace of *module*."""
        for name, value in list(vars(module).items()):
            if not isinstance(value, ModuleType):
                named = value if isinstance(value, (type, FunctionType)) else type(value)
                if isinstance(named.__module__, str):
                    self._bind(named.__module__, sys.modules.get(named.__module__))
            elif value.__name__ != f"{module.__name__}.{name}":
                # An import anywhere in the process, such as in an exporter, binds a submodule in its package. A package
                # that imports the submodule says so in its source.
                self._bind(value.__name__, value)

    def follow_sources(self) -> None:
        """Follow the imports in the sources of all files."""
        for name, file in list(self.files.items()):
            self._follow(name, file)

    def follow_source(self, path: Path, package: str) -> None:
        """Follow the imports in the source file at *path*; its relative imports start at *package*."""
        if path.suffix != ".py":
            return
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            # A file that is not a module of this Python, such as a template.
            return
        for name in _iter_imported_names(tree, package):
            self._follow(name)

    def _bind(self, name: str, module: ModuleType | None) -> None:
        """Add the *module*, which a namespace names, the packages that contain it, and what its namespace names."""
        if name in self._bound:
            return
        self._bound.add(name)
        parent = name.rpartition(".")[0]
        if parent:
            self._bind(parent, sys.modules.get(parent))
        # A module that was loaded from a path may be in no table of modules.
        if module is not None and self._add(name, module) is not None:
            self.follow_namespace(module)

    def _follow(self, name: str, file: Path | None = None) -> None:
        """Follow the source of module *name* and of the packages that contain it; a name that is no module is ignored.

        Its namespace does not count, because other code of the process may have loaded it.
        """
        if name in self._seen:
            return
        self._seen.add(name)
        parent = name.rpartition(".")[0]
        if parent:
            self._follow(parent)
        file = file or self._add(name, sys.modules.get(name))
        if file is not None:
            self.follow_source(file, name if file.stem == "__init__" else parent)

    def _add(self, name: str, loaded: ModuleType | None) -> Path | None:
        """Add the file of module *name* if it counts, and return it."""
        if name.startswith(GRADERS) and (grader := getattr(loaded, "GRADER", None)) is not None:
            self.graders[name] = str(grader)
        if name.partition(".")[0] in {"gymsdk", "__main__", ""}:
            return None
        file = _find_file(name, loaded)
        if file is None or not self._counts(name, file):
            return None
        self.files[name] = file
        return file

    def _counts(self, name: str, file: Path) -> bool:
        if name.partition(".")[0] == self._home:
            return True
        resolved = file.resolve()
        is_installed = bool(SITE_FOLDERS & {*file.parts, *resolved.parts})
        return not (is_installed or any(resolved.is_relative_to(folder) for folder in self._stdlib))


def _find_file(name: str, loaded: ModuleType | None) -> Path | None:
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
    else:
        spec = _find_spec(name)
        file = spec.origin if spec is not None and spec.has_location else None
    return Path(file) if isinstance(file, str) and Path(file).is_file() else None


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the module *name*, which is not loaded, without an import of its packages."""
    parent = name.rpartition(".")[0]
    if not parent:
        return _ask_finders(name, None)
    loaded = sys.modules.get(parent)
    if loaded is not None:
        places = getattr(loaded, "__path__", None)
    else:
        found = _find_spec(parent)
        places = found.submodule_search_locations if found is not None else None
    return None if places is None else _ask_finders(name, list(places))


def _ask_finders(name: str, places: list[str] | None) -> ModuleSpec | None:
    # Editable installs may add finders.
    for finder in (*sys.meta_path, PathFinder):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, places) if find is not None else None
        if spec is not None:
            return spec
    return None


def _iter_imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that a module may import, at its top level or in functions, by statements or by calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve_base(node, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and get_called_name(node) in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield f"{package}{first.value}" if first.value.startswith(".") else first.value


def _resolve_base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def get_called_name(node: ast.Call) -> str:
    """Return the last name of the function that *node* calls."""
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


# Distributions


def digest_distributions(name: str) -> dict[str, str]:
    """Return the digest of the distribution of environment *name*, and version and digest of direct requirements."""
    entry = registry.installed().get(name)
    home = _find_distribution(entry.distribution) if entry else None
    if entry is None or home is None:
        return {}
    # What an extra requires is not for grading: a newer pytest must not stop a run.
    needed = [requirement for requirement in home.requires or () if not _EXTRA.search(requirement)]
    names = dict.fromkeys(match[1] for requirement in needed if (match := _REQUIREMENT_NAME.match(requirement)))
    required = {
        required_name: _find_distribution(required_name)
        for required_name in names
        if required_name != entry.distribution
    }
    return {entry.distribution: _digest_record(home)} | {
        required_name: f"{found.version} {_digest_record(found)}"
        for required_name, found in required.items()
        if found is not None
    }


def _find_distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except (PackageNotFoundError, ValueError):
        return None


def _digest_record(found: Distribution) -> str:
    """Return the digest of the lines of RECORD that every install of one wheel has in common."""
    lines = (found.read_text("RECORD") or "").splitlines()
    kept = sorted(line for line in lines if _is_stable(line.partition(",")[0]))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:DIGEST_CHARS] if kept else ""


def _is_stable(path: str) -> bool:
    parts = path.split("/")
    if parts[0] == ".." or "__pycache__" in parts or parts[0].endswith(".pth") or parts[0].startswith("__editable__"):
        # Scripts outside site-packages name the interpreter, and editable installs the project's folder.
        return False
    return not parts[0].endswith(".dist-info") or parts[-1] == ENTRY_POINTS


# Variables


def read_variable_names(name: str, plugin: object) -> list[str]:
    """Return the names of the variables that the attribute `environ` of *plugin* lists.

    Raises:
        BrokenEnvironment: It is not a list of names.
    """
    listed = getattr(plugin, "environ", ())
    if listed is os.environ:
        # `from os import environ` is not a declaration.
        return []
    if not isinstance(listed, (list, tuple)) or not all(isinstance(variable, str) and variable for variable in listed):
        raise BrokenEnvironment(
            f'environment {name!r}: `environ` must be a list of names of variables, as in environ = ["GRADER_MODE"],'
            f" got {type(listed).__name__}"
        )
    return sorted(set(listed))


def _hash_variable(variable: str, key: str) -> str | None:
    value = os.environ.get(variable)
    if value is None:
        return None
    data = f"{variable}\0{value}".encode("utf-8", "surrogateescape")
    return hmac.new(key.encode(), data, "sha256").hexdigest()[: 2 * DIGEST_CHARS]


def drop_unknown_parts(stored: Mapping[str, Row], requested: Mapping[str, Row]) -> dict[str, Row]:
    """Return *requested* without the parts that no environment in *stored*, the run of an earlier version, has."""
    missing = {name: [part for part in ADDED_PARTS if part not in described] for name, described in stored.items()}
    return {
        name: {part: value for part, value in described.items() if part not in missing.get(name, ADDED_PARTS)}
        for name, described in requested.items()
    }
