"""The start-up hook: once Gymnasium's registry is imported, it knows every installed environment as `nemo/<name>`.

It runs at the start of every interpreter, so it imports nothing that is not there already.

PYTEST_DONT_REWRITE, for it is there before pytest is, which would warn of that.
"""

import os
import sys

TYPE_CHECKING = False  # what `typing` calls so; a type checker reads it as true
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object

REGISTRY = "gymnasium.envs.registration"
"""The module whose import is waited for."""


def start() -> None:
    """Wait for Gymnasium, unless `GYMSDK_NO_AUTOREGISTER` says not to: any value does but `0` and none at all."""
    if os.environ.get("GYMSDK_NO_AUTOREGISTER", "") in {"", "0"}:
        install()


def install() -> None:
    """Register the environments: at once where Gymnasium's registry is there, else as soon as it is."""
    if finder.at_work:
        return
    if REGISTRY in sys.modules:
        finder.register()
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class Finder:
    """Finds one module as the finders behind it do, and has its loader followed by a registration.

    *failure* is why the last registration failed, if it did; `gymsdk.gym.register()` raises it where it still does.
    """

    def __init__(self) -> None:
        self.at_work = False
        self.failure: BaseException | None = None

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Give the spec of Gymnasium's registry, which registers once it is loaded; no other's."""
        if name != REGISTRY:
            return None
        spec = self._found_behind(name, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = Registering(spec.loader)
        return spec

    def _found_behind(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        finders = list(sys.meta_path)
        for each in finders[finders.index(self) + 1 :] if self in finders else ():
            spec = each.find_spec(name, path, target) if hasattr(each, "find_spec") else None
            if spec is not None:
                return spec
        return None

    def register(self) -> None:
        """Register the environments and wait no longer; keep why that failed, if it does."""
        try:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            from gymsdk.gym.registration import register

            register()
            self.failure = None
        except KeyboardInterrupt:
            raise
        # The panic of a Rust extension is no `Exception`, and no more is `sys.exit` in a torn package.
        except BaseException as error:  # noqa: BLE001 - whatever is broken here, `import gymnasium` is not ours to break
            self.failure = error


class Registering(Loader):
    """The loader of Gymnasium's registry; when that has run, it steps aside for it and registers the environments."""

    def __init__(self, real: "Loader") -> None:
        self.real = real

    def __getattr__(self, name: str) -> object:
        """Give what the real loader has: its sources, its resources."""
        if name == "real":  # asked for before it is set, by `copy`
            raise AttributeError(name)
        return getattr(self.real, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Give the module as the real loader makes it."""
        return self.real.create_module(spec) if hasattr(self.real, "create_module") else None

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module as the real loader does, then register; what that raises passes as it is."""
        self._step_aside(module)
        finder.at_work = True
        try:
            self.real.exec_module(module)
            finder.register()
        finally:
            finder.at_work = False

    def _step_aside(self, module: "ModuleType") -> None:
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:
            spec.loader = self.real
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self.real


finder = Finder()
