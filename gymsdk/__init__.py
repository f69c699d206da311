"""An SDK and host for LLM environments: installable packages that define tasks, tools and verifiers."""

# Only what Python itself imports for `python -m gymsdk`: the working folder is still on the path (see `__main__`).
import importlib

TYPE_CHECKING = False  # as in `typing`: a type checker treats this name as true

try:
    import gymsdk_startup
except ImportError:  # a checkout that is on the path but not installed; call `gymsdk.gym.register()` instead
    pass
else:
    gymsdk_startup.install()

if TYPE_CHECKING:
    from typing import Any

    from gymsdk import runs
    from gymsdk.client import ServerClient
    from gymsdk.environment import Environment
    from gymsdk.episode import play
    from gymsdk.errors import BrokenEnvironment, BudgetSpent, Failed, GymsdkError, Unscorable, UsageError, WorkerLost
    from gymsdk.models.registry import model
    from gymsdk.plugins.hooks import hookimpl
    from gymsdk.plugins.registry import installed, load
    from gymsdk.types import (
        Action,
        Claims,
        Config,
        Episode,
        Message,
        Model,
        Reset,
        Rollout,
        State,
        Step,
        Task,
        ToolCall,
        Transcript,
        Verdict,
    )
    from gymsdk.workers.offload import offload

__version__ = "0.1.0"

__all__ = [
    "Action",
    "BrokenEnvironment",
    "BudgetSpent",
    "Claims",
    "Config",
    "Environment",
    "Episode",
    "Failed",
    "GymsdkError",
    "Message",
    "Model",
    "Reset",
    "Rollout",
    "ServerClient",
    "State",
    "Step",
    "Task",
    "ToolCall",
    "Transcript",
    "Unscorable",
    "UsageError",
    "Verdict",
    "WorkerLost",
    "hookimpl",
    "installed",
    "load",
    "model",
    "offload",
    "play",
    "runs",
]

_MODULES = {
    "Environment": "environment",
    "ServerClient": "client",
    "hookimpl": "plugins.hooks",
    "installed": "plugins.registry",
    "load": "plugins.registry",
    "model": "models.registry",
    "offload": "workers.offload",
    "play": "episode",
} | dict.fromkeys(
    ["BrokenEnvironment", "BudgetSpent", "Failed", "GymsdkError", "Unscorable", "UsageError", "WorkerLost"], "errors"
)


def __getattr__(name: str) -> "Any":
    # Public names are imported on first access, so that `import gymsdk` stays fast.
    if name not in __all__:
        raise AttributeError(f"module 'gymsdk' has no attribute {name!r}")
    if name == "runs":
        # The import sets the attribute.
        return importlib.import_module("gymsdk.runs")
    value = getattr(importlib.import_module(f"gymsdk.{_MODULES.get(name, 'types')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
