"""If anything is broken, `import gymnasium` behaves as without the start-up hook, and the hook prints nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Interpreter

KNOWN = "import gymnasium; print(len([name for name in gymnasium.registry if name.startswith('nemo/')]))"
FAILURE = "import gymnasium, gymsdk_startup; print(repr(gymsdk_startup.finder.failure))"


def source(folder: Path, name: str, text: str) -> Path:
    """Write a module with *text* into *folder*; return *folder*."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


PANIC = "class PanicException(BaseException): ...\nraise PanicException('of Rust')"


@pytest.mark.parametrize(
    "name", ["gymsdk_startup.py", "gymsdk/__init__.py", "gymsdk/gym/__init__.py", "gymsdk/plugins/registry.py"]
)
@pytest.mark.parametrize(
    "text", ["raise ImportError", "raise RuntimeError('torn')", "raise SystemExit(5)", PANIC, "a b", "\0"]
)
def test_a_broken_gymsdk_is_harmless(alone: Interpreter, name: str, text: str) -> None:
    source(alone.site, name, text)
    assert alone.says(KNOWN, "-W", "error") == "0"


def test_a_start_up_line_without_its_module_is_harmless_and_gymsdk_can_register_explicitly(alone: Interpreter) -> None:
    (alone.site / "gymsdk_startup.py").unlink()
    assert alone.says(KNOWN, "-W", "error") == "0"
    assert alone.says("import gymsdk.gym; print(len(gymsdk.gym.register()))") == "3"


def test_a_start_up_module_without_its_package_is_harmless(alone: Interpreter) -> None:
    (alone.site / "gymsdk").rename(alone.site / "gone")
    assert alone.says(KNOWN, "-W", "error") == "0"
    assert alone.says(FAILURE) == """ModuleNotFoundError("No module named 'gymsdk'")"""


@pytest.mark.parametrize(
    ("file", "content", "known"),
    [
        ("entry_points.txt", b"\xff\xfe", "2"),
        ("entry_points.txt", b"no section = 1", "2"),
        ("METADATA", b"\xff", "3"),
        ("METADATA", b"", "3"),
    ],
)
def test_broken_metadata_is_harmless(alone: Interpreter, file: str, content: bytes, known: str) -> None:
    (alone.site / "env_alpha-1.0.dist-info" / file).write_bytes(content)
    assert alone.says(KNOWN, "-W", "error") == known
    assert alone.says(FAILURE) == "None"


def test_the_error_is_kept_and_raised_on_request(alone: Interpreter) -> None:
    source(alone.site, "gymsdk/plugins/registry.py", "raise RuntimeError('torn')")
    assert alone.says(FAILURE) == "RuntimeError('torn')"
    assert "RuntimeError: torn" in alone.run("-c", "import gymsdk.gym; gymsdk.gym.register()").stderr


def test_missing_gymnasium_raises_the_normal_import_error(alone: Interpreter) -> None:
    (alone.site / "gymnasium").unlink()
    with_it = alone.run("-c", "import gymnasium")
    (alone.site / "gymsdk_startup.pth").unlink()
    assert with_it.stderr == alone.run("-c", "import gymnasium").stderr != ""


@pytest.mark.parametrize("module", ["__init__", "envs/__init__", "envs/registration"])
def test_an_error_inside_gymnasium_propagates_and_the_next_import_registers(
    interpreter: Interpreter, tmp_path: Path, module: str
) -> None:
    source(tmp_path, "gymnasium/__init__.py", "import gymnasium.envs.registration as its\nregistry = its.registry")
    source(tmp_path, "gymnasium/error.py", "class Error(Exception): ...")
    source(tmp_path, "gymnasium/envs/__init__.py", "import gymnasium.envs.registration")
    source(tmp_path, "gymnasium/envs/registration.py", SMALL)
    path = tmp_path / "gymnasium" / f"{module}.py"
    path.write_text("import sys\nif 'again' not in sys.modules: raise OSError(7, 'its own')\n" + path.read_text())
    code = f"""
import sys
try: import gymnasium
except OSError as error: print(error.args)
sys.modules["again"] = sys
{KNOWN}
"""
    assert interpreter.says(code, path=tmp_path).splitlines() == ["(7, 'its own')", "3"]


SMALL = """
registry = {}
class EnvSpec:
    def __init__(self, id, **others):
        self.id, (self.namespace, self.name) = id, id.split("/")
        if self.name in {"old-v2", "two words"}:
            import gymnasium.error
            raise gymnasium.error.Error
"""
"""A minimal fake of the Gymnasium registry."""


def test_a_zip_archive_works_too(interpreter: Interpreter, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "gymnasium.zip", "w") as archive:
        archive.writestr("gymnasium/__init__.py", "from gymnasium.envs.registration import registry")
        archive.writestr("gymnasium/error.py", "class Error(Exception): ...")
        archive.writestr("gymnasium/envs/__init__.py", "")
        archive.writestr("gymnasium/envs/registration.py", SMALL)
    code = KNOWN + "; print(type(gymnasium.envs.registration.__loader__).__name__)"
    assert interpreter.says(code, path=tmp_path / "gymnasium.zip").splitlines() == ["3", "zipimporter"]


LOADED = """
import gymnasium.envs.registration as module
import copy, importlib.resources, importlib.util, inspect, pickle
without = importlib.util.spec_from_file_location(module.__name__, module.__file__)
assert type(module.__loader__) is type(module.__spec__.loader) is type(without.loader)
assert module.__spec__ == without and module.__spec__.loader is module.__loader__
assert "def register(" in inspect.getsource(module)
assert pickle.loads(pickle.dumps(module.__spec__)) == without
assert importlib.resources.files("gymnasium.envs").joinpath("registration.py").is_file()
assert importlib.util.find_spec(module.__name__) is module.__spec__
"""


def test_the_loaded_module_shows_no_trace_of_the_hook(interpreter: Interpreter) -> None:
    interpreter.says(LOADED, "-W", "error")


SEEN = """
import copy, importlib.abc, pkgutil, sys
class Curious(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "gymnasium.envs.registration":
            later = iter(sys.meta_path[sys.meta_path.index(self) + 1:])
            spec = next(found for finder in later if (found := finder.find_spec(name, path, target)))
            assert "def register(" in spec.loader.get_source(name)
            assert copy.copy(spec.loader).get_filename(name) == spec.origin
            assert not spec.loader.is_package(name)
            assert not hasattr(spec.loader, "no_such_thing")
            return spec
sys.meta_path.insert(0, Curious())
"""


def test_a_finder_ahead_sees_a_whole_loader(interpreter: Interpreter) -> None:
    assert interpreter.says(SEEN + KNOWN) == "3"


AGAIN = """
import importlib, sys, gymnasium, gymsdk.gym
if {purged}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnasium"]: del sys.modules[name]
    import gymnasium
else:
    importlib.reload(gymnasium.envs.registration)
print("nemo/alpha" in gymnasium.envs.registration.registry)
gymsdk.gym.register()
print("nemo/alpha" in gymnasium.envs.registration.registry)
"""


@pytest.mark.parametrize("purged", [True, False])
def test_a_new_registry_can_be_filled_explicitly(interpreter: Interpreter, purged: bool) -> None:
    assert interpreter.says(AGAIN.format(purged=purged), "-W", "error").split() == ["False", "True"]


@pytest.mark.parametrize("first", [KNOWN, "import gymsdk"])
def test_a_reload_leaves_the_registry_of_gymnasium_unchanged(interpreter: Interpreter, first: str) -> None:
    code = f"{first}\nimport importlib, gymnasium.envs.registration as its\nprint(len(importlib.reload(its).registry))"
    assert interpreter.says(code, "-W", "error").splitlines()[-1] == "0"


def test_threads_may_import_at_the_same_time(interpreter: Interpreter) -> None:
    code = """
import importlib, threading
gate = threading.Barrier(9)
def work(name):
    gate.wait()
    importlib.import_module(name)
names = ["gymnasium", "gymsdk", "gymsdk.gym.registration"] * 3
threads = [threading.Thread(target=work, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert not any(thread.is_alive() for thread in threads)
"""
    for switch in "01":
        assert interpreter.says(code + KNOWN, "-W", "error", GYMSDK_NO_AUTOREGISTER=switch) == "3"


@pytest.mark.parametrize("flags", ["-I", "-OO", "-W error", "-X dev", "-X frozen_modules=off"])
def test_the_interpreters_flags_make_no_difference(interpreter: Interpreter, flags: str) -> None:
    assert interpreter.says(KNOWN, *flags.split()) == "3"


def test_without_site_packages_there_is_no_hook(interpreter: Interpreter) -> None:
    code = "import sys; print('gymsdk_startup' in sys.modules)"
    assert interpreter.says(code, "-S") == "False"
    assert interpreter.says(code) == "True"


def test_a_second_interpreter_in_the_process_has_the_hook_too(interpreter: Interpreter) -> None:
    code = """
try: import _interpreters as interpreters
except ImportError: import _xxsubinterpreters as interpreters
told = "import sys, gymsdk_startup; assert gymsdk_startup.finder is sys.meta_path[0]; print('waits', flush=True)"
interpreters.run_string(interpreters.create(), told)
"""
    assert interpreter.says(code) == "waits"


def test_a_start_up_line_that_runs_twice_installs_one_hook(interpreter: Interpreter) -> None:
    code = "import site, sys; site.addsitedir(site.getsitepackages()[0]); print(len(sys.meta_path))"
    assert interpreter.says(code) == "4"


def test_an_interrupt_while_registering_is_not_swallowed(interpreter: Interpreter, tmp_path: Path) -> None:
    path = source(tmp_path, "gymsdk/__init__.py", "raise KeyboardInterrupt")
    assert "KeyboardInterrupt" in interpreter.run("-c", "import gymnasium", path=path).stderr
