"""Registers each installed environment as `nemo/<name>` as soon as a program imports Gymnasium's registry.

Python runs `start` when an interpreter starts. Therefore this module imports only modules that are already loaded.

PYTEST_DONT_REWRITE: pytest cannot rewrite the assertions of a module that is imported before pytest, and would warn.
"""

import os
import sys

TYPE_CHECKING = False  # as in `typing`: a type checker treats this name as true
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object

REGISTRY = "gymnasium.envs.registration"
"""The registration follows the import of this module."""


def start() -> None:
    """Prepare the registration, unless the environment variable `GYMSDK_NO_AUTOREGISTER` is set and is not `0`."""
    if os.environ.get("GYMSDK_NO_AUTOREGISTER", "") in {"", "0"}:
        install()


def install() -> None:
    """Register the environments now if Gymnasium's registry is loaded, otherwise when a program imports it."""
    if finder.is_registering:
        return
    if REGISTRY in sys.modules:
        finder.register()
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class Finder:
    """An import hook for Gymnasium's registry; all other modules are left to the other finders.

    Attributes:
        is_registering: Whether the registry is being imported through this hook.
        failure: The error of the last registration, or `None`. `gymsdk.gym.register()` tries again and raises the
            error if the registration still fails.
    """

    def __init__(self) -> None:
        self.is_registering = False
        self.failure: BaseException | None = None

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the spec of Gymnasium's registry with a loader that registers the environments."""
        if name != REGISTRY:
            return None
        spec = self._find_with_other_finders(name, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = RegisteringLoader(spec.loader)
        return spec

    def _find_with_other_finders(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        finders = list(sys.meta_path)
        for each in finders[finders.index(self) + 1 :] if self in finders else ():
            spec = each.find_spec(name, path, target) if hasattr(each, "find_spec") else None
            if spec is not None:
                return spec
        return None

    def register(self) -> None:
        """Remove this hook and register the environments; store the error if the registration fails."""
        try:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            from gymsdk.gym.registration import register

            register()
            self.failure = None
        except KeyboardInterrupt:
            raise
        # A panic of a Rust extension and `sys.exit` in a broken package are not subclasses of `Exception`.
        except BaseException as error:  # noqa: BLE001 - a failed registration must not break `import gymnasium`
            self.failure = error


class RegisteringLoader(Loader):
    """Loads Gymnasium's registry with its *real* loader, then registers the environments."""

    def __init__(self, real: "Loader") -> None:
        self.real = real

    def __getattr__(self, name: str) -> object:
        """Return the attribute of the real loader, for example its sources or its resources."""
        if name == "real":  # `copy` reads the attribute before it is set
            raise AttributeError(name)
        return getattr(self.real, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Return the module that the real loader creates."""
        return self.real.create_module(spec) if hasattr(self.real, "create_module") else None

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module with the real loader, then register the environments.

        Raises:
            Exception: Any error of the real loader, unchanged.
        """
        self._restore_real_loader(module)
        finder.is_registering = True
        try:
            self.real.exec_module(module)
            finder.register()
        finally:
            finder.is_registering = False

    def _restore_real_loader(self, module: "ModuleType") -> None:
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:
            spec.loader = self.real
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self.real


finder = Finder()
