"""Skips tests that need a GPU on machines without one.  Run them by `make test-gpu` or `python -m pytest tests/gpu`."""

import pytest
import torch


@pytest.fixture(params=["portable", "te"])
def backend(request: pytest.FixtureRequest) -> str:
    """Of attention."""
    if request.param == "te":
        pytest.importorskip("transformer_engine.pytorch")
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.has_plugin("tests.gpu.on_cpu"):
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
