"""The environments that a new interpreter has registered after `import gymnasium` alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import KINDS, Interpreter

NEMO = "print(*(name for name in gymnasium.registry if name.startswith('nemo/')))"
KNOWN = f"import gymnasium\n{NEMO}"
ALL = "nemo/alpha nemo/gone nemo/twin"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_installation_registers_the_environments(
    kind: str, interpreters: Callable[[str], Interpreter]
) -> None:
    assert interpreters(kind).says(KNOWN) == ALL


def test_a_spec_has_the_entry_point_of_the_environment(interpreter: Interpreter) -> None:
    spec = json.loads(interpreter.says("import gymnasium; print(gymnasium.spec('nemo/alpha').to_json())"))
    assert spec["entry_point"] == "gymsdk.gym:Env"
    assert spec["vector_entry_point"] == "gymsdk.gym:VectorEnv"
    assert spec["kwargs"] == {"environment": "alpha"}
    assert spec["max_episode_steps"] is None
    assert spec["disable_env_checker"]


def test_a_misspelled_name_raises_the_error_of_gymnasium(interpreter: Interpreter) -> None:
    for name, off in (("nemo/alpa", "0"), ("gymsdk:nemo/alpa", "1")):
        ran = interpreter.run("-c", f"import gymnasium; gymnasium.make('{name}')", GYMSDK_NO_AUTOREGISTER=off)
        assert "Environment `alpa` doesn't exist in namespace nemo. Did you mean: `alpha`?" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [("alpha", "cannot be imported"), ("gone", "reinstall the package"), ("twin", "uninstall all but one")],
)
def test_making_a_broken_environment_reports_the_cause(interpreter: Interpreter, name: str, sentence: str) -> None:
    ran = interpreter.run("-c", f"import gymnasium; gymnasium.make('nemo/{name}')")
    assert "BrokenEnvironment" in ran.stderr
    assert sentence in ran.stderr


SUMS = """
from typing import Literal
from gymsdk import Task, Verdict, hookimpl

@hookimpl
def tasks(split: Literal["test"]):
    yield Task.ask("What is 40 + 2?")

@hookimpl
def verify(transcript):
    return Verdict(reward=float(transcript.reply == "42"))
"""


@pytest.mark.parametrize(("id", "off"), [("nemo/sums", "0"), ("gymsdk:nemo/sums", "1")])
def test_an_environment_is_made_and_played(alone: Interpreter, add: Callable[..., None], id: str, off: str) -> None:
    add(alone.site, "sums")
    (alone.site / "env_sums.py").write_text(SUMS)
    code = f"import gymnasium; env = gymnasium.make({id!r}); env.reset(); print(env.step('42')[1:4]); env.close()"
    assert alone.says(code, "-W", "error", GYMSDK_NO_AUTOREGISTER=off) == "(1.0, True, False)"


def test_registration_imports_no_environment_and_no_play_modules(interpreter: Interpreter) -> None:
    modules = interpreter.says("import gymnasium, sys; print(*sys.modules)").split()
    assert {"gymnasium", "gymsdk.gym.registration"} <= set(modules)
    assert {"env_alpha", "pydantic", "asyncio", "gymsdk.environment", "gymsdk.gym.env"} & set(modules) == set()


def test_the_start_of_an_interpreter_imports_one_module(alone: Interpreter) -> None:
    code = "import sys; print(*sys.modules)"
    with_it = set(alone.says(code).split())
    (alone.site / "gymsdk_startup.pth").unlink()
    # Newer Python versions read every `.pth` file with `encodings.utf_8_sig`.
    assert with_it - set(alone.says(code).split()) - {"encodings.utf_8_sig"} == {"gymsdk_startup"}


def test_importing_gymsdk_does_not_import_gymnasium(interpreter: Interpreter) -> None:
    code = "import sys, gymsdk; print('gymnasium' in sys.modules, len(sys.meta_path))"
    waiting = interpreter.says(code)
    assert waiting == interpreter.says(code, GYMSDK_NO_AUTOREGISTER="1") == "False 4"


OFF = {"GYMSDK_NO_AUTOREGISTER": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "variables", "expected"),
    [
        (KNOWN, {"GYMSDK_DISABLE": "alpha,gone"}, "nemo/twin"),
        *((KNOWN, {"GYMSDK_NO_AUTOREGISTER": off}, "") for off in ("1", "false")),
        *((KNOWN, {"GYMSDK_NO_AUTOREGISTER": on}, ALL) for on in ("0", "")),
        (f"import gymsdk, gymnasium; {NEMO}", OFF, ALL),
        (f"import gymnasium, gymsdk; {NEMO}", OFF, ALL),
        ("from gymsdk.gym import register; print(*register())", OFF, ALL),
        (f"import gymnasium\nwith gymnasium.envs.registration.namespace('their'): import gymsdk\n{NEMO}", OFF, ALL),
        ("import sys, gymnasium; print('gymsdk' in repr([type(finder) for finder in sys.meta_path]))", {}, "False"),
    ],
)
def test_environments_are_registered_once_unless_they_are_hidden_or_the_hook_is_off(
    interpreter: Interpreter, code: str, variables: dict[str, str], expected: str
) -> None:
    assert interpreter.says(code, "-W", "error", **variables) == expected


@pytest.mark.slow
def test_an_environment_installed_later_is_added_on_request(
    interpreter: Interpreter, tmp_path: Path, add: Callable[..., None]
) -> None:
    add(tmp_path, "late")
    code = (
        f"import gymnasium, sys, gymsdk.gym; sys.path.append({str(tmp_path)!r}); print(gymsdk.gym.register()); {NEMO}"
    )
    assert interpreter.says(code, "-W", "error").splitlines() == [
        "['nemo/alpha', 'nemo/gone', 'nemo/late', 'nemo/twin']",
        f"{ALL} nemo/late",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("existing", ["nemo/alpha", "nemo/alpha-v3"])
def test_an_existing_id_is_not_replaced(interpreter: Interpreter, existing: str) -> None:
    code = f"""
import gymnasium
gymnasium.register({existing!r}, entry_point="their:Env")
import gymsdk
print(gymnasium.registry[{existing!r}].entry_point, len([name for name in gymnasium.registry if "alpha" in name]))
"""
    assert interpreter.says(code, "-W", "error", GYMSDK_NO_AUTOREGISTER="1") == "their:Env 1"


@pytest.mark.slow
def test_pytest_starts_with_warnings_as_errors(interpreter: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): ...\n")
    own = ("-p", "no:cacheprovider", "-p", "no:asyncio")  # the asyncio plugin emits its own warning
    ran = interpreter.run("-W", "error", "-m", "pytest", "-W", "error", *own, str(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert "gymsdk" in ran.stdout.partition("plugins: ")[2].partition("\n")[0]
