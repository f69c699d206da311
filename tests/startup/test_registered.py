"""What a new interpreter knows with nothing but `import gymnasium`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import KINDS, Interpreter

NEMO = "print(*(name for name in gymnasium.registry if name.startswith('nemo/')))"
KNOWN = f"import gymnasium\n{NEMO}"
ALL = "nemo/alpha nemo/gone nemo/twin"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_install_makes_the_environments_known(kind: str, interpreters: dict[str, Interpreter]) -> None:
    assert interpreters[kind].says(KNOWN) == ALL


def test_the_registry_shows_them(interpreter: Interpreter) -> None:
    shown = interpreter.says("import gymnasium; gymnasium.pprint_registry()")
    assert "===== nemo =====\nnemo/alpha" in shown


def test_a_spec_says_how_to_make_the_environment(interpreter: Interpreter) -> None:
    spec = json.loads(interpreter.says("import gymnasium; print(gymnasium.spec('nemo/alpha').to_json())"))
    assert spec["entry_point"] == "gymsdk.gym:Env"
    assert spec["vector_entry_point"] == "gymsdk.gym:VectorEnv"
    assert spec["kwargs"] == {"environment": "alpha"}
    assert spec["max_episode_steps"] is None
    assert spec["disable_env_checker"]


def test_a_spec_comes_back_from_its_json(interpreter: Interpreter) -> None:
    again = "spec = gymnasium.spec('nemo/alpha'); print(type(spec).from_json(spec.to_json()) == spec)"
    assert interpreter.says(f"import gymnasium; {again}") == "True"


def test_a_slip_in_the_name_is_answered_as_gymnasium_does(interpreter: Interpreter) -> None:
    ran = interpreter.run("-c", "import gymnasium; gymnasium.make('nemo/alpa')")
    assert "Environment `alpa` doesn't exist in namespace nemo. Did you mean: `alpha`?" in ran.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("alpha", "cannot be imported"), ("gone", "reinstall the package"), ("twin", "uninstall all but one")],
)
def test_making_a_broken_environment_says_what_is_wrong(interpreter: Interpreter, name: str, sentence: str) -> None:
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


def test_neither_an_environment_nor_what_playing_one_needs_is_imported(interpreter: Interpreter) -> None:
    told = interpreter.says("import gymnasium, sys; print(*sys.modules)").split()
    assert {"gymnasium", "gymsdk.gym.registration"} <= set(told)
    assert {"env_alpha", "pydantic", "asyncio", "gymsdk.environment", "gymsdk.gym.env"} & set(told) == set()


def test_the_start_of_an_interpreter_imports_one_module(alone: Interpreter) -> None:
    code = "import sys; print(*sys.modules)"
    with_it = set(alone.says(code).split())
    (alone.site / "gymsdk_startup.pth").unlink()
    # By `encodings.utf_8_sig` newer Pythons read any `.pth`.
    assert with_it - set(alone.says(code).split()) - {"encodings.utf_8_sig"} == {"gymsdk_startup"}


def test_hidden_environments_stay_hidden(interpreter: Interpreter) -> None:
    assert interpreter.says(KNOWN, GYMSDK_DISABLE="alpha,gone") == "nemo/twin"


def test_the_hook_can_be_switched_off(interpreter: Interpreter) -> None:
    for off in ("1", "true", "false", "no"):
        assert interpreter.says(KNOWN, GYMSDK_NO_AUTOREGISTER=off) == ""
    for on in ("0", ""):
        assert interpreter.says(KNOWN, GYMSDK_NO_AUTOREGISTER=on) == ALL


def test_naming_gymsdk_in_the_id_registers_also_with_the_hook_off(interpreter: Interpreter) -> None:
    ran = interpreter.run("-c", "import gymnasium; gymnasium.make('gymsdk:nemo/alpa')", GYMSDK_NO_AUTOREGISTER="1")
    assert "Did you mean: `alpha`?" in ran.stderr


@pytest.mark.parametrize("order", ["gymsdk, gymnasium", "gymnasium, gymsdk"])
def test_importing_gymsdk_before_or_after_registers_also_with_the_hook_off(
    interpreter: Interpreter, order: str
) -> None:
    assert interpreter.says(f"import {order}; {NEMO}", "-W", "error", GYMSDK_NO_AUTOREGISTER="1") == ALL


def test_importing_gymsdk_does_not_import_gymnasium(interpreter: Interpreter) -> None:
    code = "import sys, gymsdk; print('gymnasium' in sys.modules, len(sys.meta_path))"
    waiting = interpreter.says(code)
    assert waiting == interpreter.says(code, GYMSDK_NO_AUTOREGISTER="1") == "False 4"


def test_the_finder_is_gone_once_it_has_registered(interpreter: Interpreter) -> None:
    code = "import sys, gymnasium, gymsdk; print(any('gymsdk' in type(each).__module__ for each in sys.meta_path))"
    assert interpreter.says(code) == "False"


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


def test_registering_by_hand_needs_no_import_of_gymnasium_before(interpreter: Interpreter) -> None:
    code = "from gymsdk.gym import register; print(*register())"
    assert interpreter.says(code, GYMSDK_NO_AUTOREGISTER="1") == ALL


@pytest.mark.parametrize("theirs", ["nemo/alpha", "nemo/alpha-v3"])
def test_an_id_that_somebody_registered_is_left_alone(interpreter: Interpreter, theirs: str) -> None:
    code = f"""
import gymnasium
gymnasium.register({theirs!r}, entry_point="their:Env")
import gymsdk
print(gymnasium.registry[{theirs!r}].entry_point, len([name for name in gymnasium.registry if "alpha" in name]))
"""
    assert interpreter.says(code, "-W", "error", GYMSDK_NO_AUTOREGISTER="1") == "their:Env 1"


def test_an_id_is_the_same_inside_somebodys_namespace(interpreter: Interpreter) -> None:
    code = "import gymnasium\nwith gymnasium.envs.registration.namespace('their'): import gymsdk\n"
    assert interpreter.says(code + NEMO, GYMSDK_NO_AUTOREGISTER="1") == ALL


def test_pytest_starts_with_warnings_as_errors(interpreter: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): ...\n")
    own = ("-p", "no:cacheprovider", "-p", "no:asyncio")  # the plugin of asyncio warns by itself
    ran = interpreter.run("-W", "error", "-m", "pytest", "-W", "error", *own, str(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    assert "gymsdk" in ran.stdout.partition("plugins: ")[2].partition("\n")[0]
