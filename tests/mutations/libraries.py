"""The server of warm_pytest.py imports this module before it forks, so forked processes need not import libraries."""

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
