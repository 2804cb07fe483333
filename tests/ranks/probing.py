"""Runs `sft probe` on the ranks of a pool, with a fault in the code that the probe examines."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from sft.cli import main
from sft.data.packing import dynamic_cp, pack
from sft.mcore.backends.portable import Portable
from sft.mcore.checkpoint_io import engine_state
from sft.mcore.engine import Engine
from sft.parallel import context_parallel
from sft.parallel.branches import Branches
from sft.parallel.layout import Layout
from sft.probe.session import model, session
from sft.recipe.load import load_recipe
from tests.launching import RECIPE
from tests.ranks.commands import sft
from tests.ranks.pool import RankPool, join

TREES = "data.turns=each"


def prepare(folder: Path, text: str = RECIPE) -> Path:
    """A recipe with prepared data: packs of 256 bytes with three chats of different lengths."""
    lengths = [(i % 7, 9 + 5 * i % 23) for i in range(24)]
    chats = [[("user", "?" * n), ("assistant", "ab" * m)] for n, m in lengths]
    rows = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    return _prepared(folder, [{"messages": row} for row in rows], text)


def prepare_trees(folder: Path) -> Path:
    """A recipe with prepared data: packs of two trees, each with three answers to one question."""
    answers = [["ab" * (4 + i % 3), "cd" * (5 + i % 5), "ef" * (14 + i % 2)] for i in range(24)]
    rows = [{"prompt": "?" * (9 + i % 7), "completions": texts} for i, texts in enumerate(answers)]
    return _prepared(folder, rows, RECIPE, TREES)


def _prepared(folder: Path, rows: list[dict[str, Any]], text: str, *overrides: str) -> Path:
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = folder / "recipe.yaml"
    recipe.write_text(text.format(folder=folder))
    assert main(["data", "prepare", str(recipe), *overrides]) == 0
    return recipe


def probe(pool: RankPool, recipe: Path, words: list[str], fault: str | None = None) -> tuple[int, dict[str, Any]]:
    """The exit code, which is the same on every rank, and the content of --json: `probe(pool, recipe, ["leak",
    "parallel.cp=2"])`."""
    answer, (question, *rest) = recipe.parent / "answer.json", words
    answer.unlink(missing_ok=True)
    within = FAULTS[fault] if fault else nullcontext
    result = sft(pool, "probe", question, str(recipe), *rest, "--json", str(answer), within=within)
    return result.code, json.loads(answer.read_text()) if answer.exists() else {}


def save_weights(recipe: Path, folder: str) -> None:
    """Writes a checkpoint, without manifest, of random weights of another seed."""
    loaded = load_recipe(str(recipe), ["run.seed=5"])
    join()
    with session(loaded, Layout.resolve(loaded.config, 2)) as s, model(s) as (engine, _):
        engine_state.write(engine_state.snapshot(engine, {"iteration": 0}), Path(folder), engine.groups.control)


def ignored_boundaries() -> Any:
    """Fault: the second pipeline stage treats the pack as one document."""
    documents = Portable.documents

    def faulty(backend: Portable, cu_seqlens: Any, max_seqlen: int, *rest: Any) -> Any:
        if os.environ["RANK"] == "1":
            cu_seqlens, max_seqlen = cu_seqlens[[0, -1]], int(cu_seqlens[-1])
        return documents(backend, cu_seqlens, max_seqlen, *rest)

    return mock.patch.object(Portable, "documents", faulty)


def seen_sibling() -> Any:
    """Fault: a branch continues the first token of the branch before it, where both have the same parent."""
    documents = Portable.documents

    def faulty(backend: Portable, *arguments: Any) -> Any:
        *others, branches = arguments
        is_second = np.append(False, (branches.parents[1:] >= 0) & (np.diff(branches.parents) == 0))
        numbers = np.arange(len(branches))
        parents = np.where(is_second, numbers - 1, branches.parents)
        return documents(backend, *others, Branches.of(parents, np.where(is_second, 1, branches.forks)))

    return mock.patch.object(Portable, "documents", faulty)


def late_shift() -> Any:
    """Fault: labels are shifted after the split over cp ranks, so the last token of a chunk gets a label from another
    chunk."""
    local_part = pack.local_part

    def faulty(*args: Any, **options: Any) -> Any:
        mb = local_part(*args, **options)
        return replace(mb, labels=mb.tokens.roll(-1, dims=1))

    return mock.patch.object(pack, "local_part", faulty)


def running_positions() -> Any:
    """Fault: positions count through the whole pack."""
    make_pack = pack.Collator.pack

    def faulty(*args: Any) -> Any:
        made = make_pack(*args)
        return replace(made, position_ids=np.arange(len(made.tokens), dtype=np.int32))

    return mock.patch.object(pack.Collator, "pack", faulty)


def contiguous_split() -> Any:
    """Fault: every rank gets one contiguous piece of each document; attention still treats it as two zigzag chunks."""

    def faulty(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
        pieces = [np.array_split(np.arange(a, b), cp_size)[cp_rank] for a, b in zip(cu_seqlens, cu_seqlens[1:])]
        return np.concatenate(pieces)

    return mock.patch.object(context_parallel, "local_indices", faulty)


def same_part() -> Any:
    """Fault: every context-parallel rank gets the part of rank 0."""
    local_indices = context_parallel.local_indices

    def faulty(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
        return local_indices(cu_seqlens, cp_size, 0)

    return mock.patch.object(context_parallel, "local_indices", faulty)


def scaled_gradient() -> Any:
    """Fault: with context parallelism, the gradient of one weight is a thousandth too large."""
    finalize = Engine._finalize

    def faulty(engine: Engine, chunks: list[Any], *args: Any, **core: Any) -> None:
        finalize(engine, chunks, *args, **core)
        if engine.layout.cp == 2:
            torch._foreach_mul_([p.main_grad for n, p in chunks[0].named_parameters() if "linear_proj" in n], 1.001)

    return mock.patch.object(Engine, "_finalize", faulty)


def other_plan() -> Any:
    """Fault: one rank plans every document on all ranks of the largest CP group."""
    assign = dynamic_cp.assign

    def faulty(*args: Any, **options: Any) -> Any:
        grid = assign(*args, **options)
        if os.environ["RANK"] == "1":
            samples = tuple(sorted({i for slots in grid for slot in slots for i in slot.samples}))
            grid = [[dynamic_cp.Slot(options["cp"], samples)] for _ in grid]
        return grid

    return mock.patch.object(dynamic_cp, "assign", faulty)


FAULTS: dict[str, Callable[[], Any]] = {
    "other plan on a rank": other_plan,
    "cu_seqlens ignored on one stage": ignored_boundaries,
    "a branch sees its sibling": seen_sibling,
    "labels shifted after the split": late_shift,
    "positions not reset": running_positions,
    "contiguous split": contiguous_split,
    "the same part on every rank": same_part,
    "gradient times 1.001": scaled_gradient,
}
