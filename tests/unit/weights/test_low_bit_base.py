"""A base in low bits: files without low bits, another base when a run resumes, and merged exports."""

from pathlib import Path
from typing import Any

import pytest

from sft.console import QUIET
from sft.errors import CheckpointError, ConfigError
from sft.weights.export.merged_weights import open_merged
from sft.weights.initial import describe
from sft.weights.lora.base_digest import remembered_digest
from tests.builders import of_hf, parsed
from tests.unit.fixtures import hf, packed

LORA = "lora.rank=4"


def test_files_in_bf16_have_no_low_bits_to_keep(tmp_path: Path) -> None:
    folder = hf.save(tmp_path / "model", "qwen3")
    config = of_hf(str(folder), "model.base_dtype=as_stored", LORA).config
    with pytest.raises(ConfigError, match="keeps weights in the low bits of .*, but its files have none.  model.base"):
        describe(config, None)
    assert "tensors trained" in describe(of_hf(str(folder), "model.base_dtype=nf4", LORA).config, None)


def test_packed_files_are_kept(tmp_path: Path) -> None:
    folder = hf.save(tmp_path / "model", "qwen3", hidden_size=64, intermediate_size=96)
    packed.quantise(folder, "int4")
    hf.change(folder, quantization_config=packed.FORMS["int4"].config())
    config = of_hf(str(folder), "model.base_dtype=as_stored", LORA).config
    assert "tensors stored in INT4" in describe(config, None)
    assert config.model.pretrained is not None and config.model.pretrained.stored_format is not None
    assert config.model.pretrained.stored_format.name == "INT4"


def test_weights_rounded_to_nf4_are_another_base(tmp_path: Path) -> None:
    """Adapters of one base fit no other."""
    digests = {
        remembered_digest(parsed(f"model.base_dtype={dtype}", LORA).config, tmp_path) for dtype in ("bf16", "nf4")
    }
    assert len(digests) == 2 and "random weights, seed 1234" in digests


def test_adapters_beside_nf4_are_not_merged_into_other_weights(tmp_path: Path) -> None:
    original: Any = None
    with pytest.raises(CheckpointError, match="trained beside weights in NF4 .* --no-merged exports the adapters"):
        open_merged(tmp_path, {}, {"model.base_dtype": "nf4"}, {}, like=None, original=original, console=QUIET)
