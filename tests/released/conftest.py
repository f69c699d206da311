"""Fixtures for the tests against released versions of NeMo Gym; each version is downloaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from released.wheels import VERSIONS, checkout


@pytest.fixture(scope="session", params=VERSIONS)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root folder of a released version, with `resources_servers/`, `responses_api_models/` and so on."""
    return checkout(request.param, tmp_path_factory.mktemp("released"))
