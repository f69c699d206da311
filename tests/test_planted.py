"""The planted faults fit the code: `tests/planted/plant.py` plants them and runs the tests that catch them."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import plant

FAULTS = plant.read_faults()

CODE = """
def add(paid, reward):
    if paid:
        return paid + reward
    return reward
"""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fits_the_code_and_its_tests_exist(name: str) -> None:
    plant.check_fault(FAULTS[name], plant.ROOT)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one module, and a fault in it whose lines are indented otherwise."""
    (tmp_path / "gymsdk").mkdir()
    (tmp_path / "gymsdk" / "moved.py").write_text(CODE)
    (tmp_path / "sum-lost.fault").write_text(
        "breaks: The sum.\ntests: test_sum.py::test_sum\nfile: gymsdk/gone.py\n if paid:\n-    return paid + reward\n"
        "+    return reward\n"
    )
    return tmp_path


def test_a_fault_follows_lines_that_have_moved(tree: Path) -> None:
    plant.plant(plant.read_fault(tree / "sum-lost.fault"), tree)
    assert (tree / "gymsdk" / "moved.py").read_text() == CODE.replace("paid + reward", "reward")


@pytest.mark.parametrize(
    ("code", "problem"),
    [(CODE.replace("paid +", "1 +"), "no longer in the package"), (CODE * 2, "several places .*moved.py:3.*:8")],
)
def test_a_fault_that_no_longer_fits_is_named(tree: Path, code: str, problem: str) -> None:
    (tree / "gymsdk" / "moved.py").write_text(code)
    with pytest.raises(plant.FaultError, match=f"sum-lost: .*{problem}"):
        plant.plant(plant.read_fault(tree / "sum-lost.fault"), tree)


def test_a_test_that_was_renamed_is_named(tree: Path) -> None:
    (tree / "test_sum.py").write_text("def test_total(): pass\n")
    with pytest.raises(plant.FaultError, match=r"there is no test test_sum\.py::test_sum"):
        plant.check_fault(plant.read_fault(tree / "sum-lost.fault"), tree)


@pytest.mark.parametrize(
    ("status", "output", "problem"),
    [
        (0, "2 passed", "not caught by test_sum.py::test_sum"),
        (1, "FAILED test_sum.py::test_other - assert 1", "not caught by test_sum.py::test_sum"),
        (2, "ERROR test_sum.py", "did not run"),
    ],
)
def test_a_fault_that_no_test_catches_is_named(tree: Path, status: int, output: str, problem: str) -> None:
    with pytest.raises(plant.FaultError, match=problem):
        plant.check_caught(plant.read_fault(tree / "sum-lost.fault"), status, output)


def test_a_fault_that_its_tests_catch_is_fine(tree: Path) -> None:
    plant.check_caught(plant.read_fault(tree / "sum-lost.fault"), 1, "FAILED test_sum.py::test_sum[3] - assert 1")
