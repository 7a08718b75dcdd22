"""What tests of several distributions share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests shall run the passes and not read what they made before; with a number here and MINIORT_CACHE_DIR they do the latter.
os.environ.setdefault("MINIORT_GRAPH_CACHE_MB", "0")

# Tests run in several processes, and each would otherwise have as many BLAS threads as there are cores. Read when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis.internal.conjecture import providers as hypothesis_providers

from miniort.plugins import PluginManager, create_plugin_manager

DRAWN_FROM_A_SEED = ("tests/conformance/", "tests/core/graph/", "tests/providers/")


@pytest.fixture(autouse=True)
def the_same_draws_in_every_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis also draws constants that it finds in whatever modules are loaded: without them a seed gives the same cases everywhere."""
    if request.node.nodeid.startswith(DRAWN_FROM_A_SEED):
        hypothesis_providers.CONSTANTS_CACHE.cache.clear()
        nothing = type(hypothesis_providers._local_constants)()
        monkeypatch.setattr(hypothesis_providers, "_get_local_constants", lambda: nothing)


@pytest.fixture(autouse=True, scope="session")
def a_cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is written into the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        if "MINIORT_CACHE_DIR" not in os.environ:
            patch.setenv("MINIORT_CACHE_DIR", str(tmp_path_factory.mktemp("miniort-cache")))
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def collection() -> Path:
    """All decoders that were exported for these tests: 25 MB, so they lie beside the repository and not in it."""
    given = os.environ.get("MINIORT_FIXTURES")
    folder = Path(given) if given else Path(__file__).parents[2] / "shared" / "fixtures"
    if not folder.is_dir():
        pytest.skip("the collection of exported decoders isn't here; MINIORT_FIXTURES names its folder")
    return folder


@pytest.fixture(scope="session")
def plugins() -> PluginManager:
    """Every installed plugin. Tests that change a manager make their own."""
    return create_plugin_manager()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running `HubServer`, as the hub of this process and of those that it starts; caches and logins are in a temporary folder."""
    from huggingface_hub import close_session, constants

    path = Path(__file__).parent / "plugins" / "models" / "hub_server.py"
    spec = importlib.util.spec_from_file_location("miniort_test_hub_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)

    for name in [*os.environ]:
        if name.startswith(("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "MINIORT_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = tmp_path / "hf-home"
    with module.HubServer().running() as server:
        for name, value in {
            "HF_ENDPOINT": server.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MINIORT_CACHE_DIR": str(tmp_path / "miniort-cache"),
        }.items():
            monkeypatch.setenv(name, value)
        # What huggingface_hub took from the environment when it was imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        close_session()
    del sys.modules[spec.name]
