"""Writes recipes/planned/: layouts that `sft plan` proposes for the models of this project.  All numbers are predicted.

python -m tools.plan_recipes            write all recipes
python -m tools.plan_recipes --check    exit status 1 if a recipe is out of date

The predictions use the assumed constants, even on a machine that has a calibration.  config.json comes from tests/.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from os.path import commonprefix
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sft.console import short_count
from sft.estimate import constants, gpus
from sft.estimate.gpus import GIB
from sft.estimate.lengths import Lengths
from sft.planner.search import Search
from sft.planner.subject import recipe_of, slug
from sft.planner.task import Hardware, Task
from sft.planner.written import recipe_text
from sft.weights.trained import trained_weights

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes" / "planned"
RELEASED = ROOT / "tests" / "unit" / "fixtures" / "released"
GPUS_PER_NODE, HOST_GIB, LARGE_HOST_GIB = 8, 1000.0, 1300.0
K, M = 2**10, 2**20
FIVE_M = 5_000_192  # tokens, a multiple of 2 x cp 64; inputs of 32 layers of 8B then take 1,146 GiB of the host
_LARGE, _TOKENS, _LARGE_TOKENS = 16, M, 4 * M  # from 16 nodes on, a step has 4M tokens instead of 1M
CONFIGS = {  # name on the hub -> file of RELEASED
    "Qwen/Qwen3-0.6B": "qwen3_0p6b",
    "Qwen/Qwen3-8B": "qwen3_8b",
    "Qwen/Qwen3-32B": "qwen3_32b",
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama_3_1_8b",
    "openai/gpt-oss-20b": "gpt_oss_20b",
    "openai/gpt-oss-120b": "gpt_oss_120b",
    "google/gemma-3-27b-it": "gemma_3_27b",
    "Qwen/Qwen3.6-27B": "qwen3_6_27b",
    "Qwen/Qwen3.6-35B-A3B": "qwen3_6_35b_a3b",
    "google/gemma-4-26B-A4B-it": "gemma_4_26b_a4b",
    "zai-org/GLM-4.5-Air": "glm_4_5_air",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_3_nano_30b_a3b",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi_linear_48b_a3b",
    "meta-models/Muse-Glimmer-30B": "muse_glimmer_30b",  # the sizes that transformers 5.23 has as defaults
}
# Model -> cases: tokens of a pack, number of nodes, and whether adapters are trained.
CASES: dict[str, tuple[tuple[int, int, bool], ...]] = {
    "Qwen/Qwen3-0.6B": ((128 * K, 1, False), (M, 2, False)),
    "Qwen/Qwen3-8B": (
        *((32 * K, 1, False), (128 * K, 1, False), (256 * K, 4, False), (512 * K, 8, False), (M, 16, False)),
        *((128 * K, 1, True), (M, 4, True), (M, 1, False), (M, 1, True)),
    ),
    "Qwen/Qwen3-32B": ((128 * K, 4, False), (M, 1, False), (M, 1, True)),
    "meta-llama/Llama-3.1-8B-Instruct": (
        *((64 * K, 1, False), (256 * K, 4, False), (512 * K, 8, False), (M, 16, False)),
        *((256 * K, 1, True), (512 * K, 4, True), (M, 1, False), (M, 1, True)),
        (FIVE_M, 1, False),
    ),
    "Qwen/Qwen3-30B-A3B": (
        *((32 * K, 2, False), (128 * K, 4, False), (256 * K, 8, False), (M, 32, False)),
        *((128 * K, 1, True), (512 * K, 8, True)),
    ),
    "openai/gpt-oss-20b": ((32 * K, 2, False), (128 * K, 8, False), (128 * K, 2, True)),
    "openai/gpt-oss-120b": ((128 * K, 1, True),),
    "meta-models/Muse-Glimmer-30B": ((128 * K, 4, False), (128 * K, 1, True)),
    "google/gemma-3-27b-it": ((32 * K, 4, False), (128 * K, 8, False), (64 * K, 2, True)),
    "Qwen/Qwen3.6-27B": ((64 * K, 4, False), (256 * K, 8, False), (M, 32, False), (256 * K, 2, True)),
    "Qwen/Qwen3.6-35B-A3B": (
        *((64 * K, 4, False), (256 * K, 8, False), (M, 32, False), (256 * K, 2, True)),
        *((M, 1, False), (M, 1, True)),
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ((256 * K, 1, False), (256 * K, 1, True)),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": ((256 * K, 1, False), (256 * K, 1, True)),
}


class Case(NamedTuple):
    model: str
    seq_length: int
    nodes: int
    is_lora: bool

    @property
    def file(self) -> str:
        """The name of the file: qwen3_8b_256k_4n.yaml, llama31_8b_512k_lora_4n.yaml"""
        kind = "_lora" if self.is_lora else ""
        length = "5m" if self.seq_length == FIVE_M else short_count(self.seq_length).lower()
        return f"{slug(self.model)}_{length}{kind}_{self.nodes}n.yaml"

    @property
    def host_bytes(self) -> float:
        return GIB * (LARGE_HOST_GIB if self.seq_length == FIVE_M else HOST_GIB)


# Models whose frozen base stays in the low bits of its files.
AS_STORED = ("openai/gpt-oss-120b",)


def cases() -> list[Case]:
    return [Case(model, *case) for model, listed in CASES.items() for case in listed]


def sibling(case: Case) -> str:
    """A text that names the next recipe of the same model, or if there is none, the one with the most similar name.

    "qwen3_8b_128k_1n.yaml, the same model with other packs or on other GPUs."
    """
    same = [other for other in cases() if other.model == case.model]
    if same == [case]:
        others = [other.file for other in cases() if other != case]
        return f"{max(others, key=lambda file: len(commonprefix([file, case.file])))}, a model of the same family."
    return f"{same[(same.index(case) + 1) % len(same)].file}, the same model with other packs or on other GPUs."


def planned(case: Case) -> str:
    """The text of the recipe.  The current folder must be the one of `released_models`."""
    tokens = _LARGE_TOKENS if case.nodes >= _LARGE else _TOKENS
    recipe = recipe_of(
        case.model,
        seq_length=case.seq_length,
        tokens_per_step=tokens,
        is_lora=case.is_lora,
        overrides=["model.base_dtype=as_stored"] if case.model in AS_STORED else (),
    )
    gpu, vocab_size = gpus.gpu("h100"), recipe.config.model.vocab_size
    assert vocab_size is not None, case.model
    task = Task.of(
        case.model,
        recipe.config,
        vocab_size=vocab_size,
        trained=trained_weights(recipe.config, vocab_size),
        lengths=Lengths.all_of(case.seq_length),
        hardware=Hardware(
            gpu=gpu,
            gpus_per_node=GPUS_PER_NODE,
            fabric="ib400",
            constants=constants.assumed(gpu, gpus.fabric("ib400")),
            host_bytes=case.host_bytes,
        ),
    )
    proposals = Search(task, case.nodes * GPUS_PER_NODE).best(1)
    if not proposals:
        raise SystemExit(f"{case.file}: nothing fits; change CASES")
    return recipe_text(recipe, task, proposals[0], path=f"recipes/planned/{case.file}", sibling=sibling(case))


@contextmanager
def released_models() -> Iterator[None]:
    """A context in a temporary working folder, which has a folder with config.json for each name of a model."""
    with TemporaryDirectory() as folder, chdir(folder):
        for name, file in CONFIGS.items():
            Path(name).mkdir(parents=True)
            shutil.copy(RELEASED / f"{file}.json", Path(name, "config.json"))
        yield


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only print which recipes are out of date")
    is_check = parser.parse_args(argv).check
    with released_models():
        texts = {case.file: planned(case) for case in cases()}
    stored = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")}
    stale = sorted(name for name in {*texts, *stored} if texts.get(name) != stored.get(name))
    for name in stale:
        if is_check:
            print(f"recipes/planned/{name} is out of date; run: python -m tools.plan_recipes", file=sys.stderr)
        elif name in texts:
            (folder / name).write_text(texts[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
