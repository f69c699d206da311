"""What the tests against released versions of NeMo Gym share: each version, downloaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from released.wheels import VERSIONS, checkout


@pytest.fixture(scope="session", params=VERSIONS)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a released version: `resources_servers/`, `responses_api_models/` and so on lie in it."""
    return checkout(request.param, tmp_path_factory.mktemp("released"))
