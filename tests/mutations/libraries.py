"""What the server of warm_pytest.py imports before it forks, so that no forked process has to."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import hypothesis.strategies
    import megatron.core
    import pydantic
    import pytest
    import pytest_timeout  # type: ignore[import-untyped]
    import tensorboard
    import torch
    import transformers
