"""Sorts the allocations of a step into categories, and finds the instant at which most bytes are allocated.

Only an allocation whose caller is Python has a stack.  Autograd's own operations on CUDA run in a thread without
Python, so the stacks of their allocations are empty.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Frame = tuple[str, str]  # path of a file, name of a function; a stack lists its innermost frame first

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
SAVED, ROTARY, WORKING = "saved by layers", "rotary", "working"
OTHER = "other"  # blocks that existed before the step: workspaces of cuBLAS
# The output of the embedding is the first layer's input.
_LAYERS = ("sft/mcore/model/layer.py", "sft/mcore/model/mtp.py", "embeddings/language_model_embedding.py")


@dataclass(frozen=True)
class Event:
    """num_bytes: bytes of the block; negative if the block was freed"""

    address: int
    num_bytes: int
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Peak:
    """by_category: bytes of each category; where: category of the allocation that made the peak; largest: largest
    stacks, for a reader"""

    by_category: dict[str, int]
    where: str
    largest: list[tuple[int, str]]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


def category_of(frames: tuple[Frame, ...]) -> str:
    """The category of a block that a step allocates.

    A tensor that a layer makes in the forward pass, and that exists at the peak, is saved for backward.  Tensors that
    offload copies back from the host also count as saved, and so do hidden states from other pipeline stages, because
    they are inputs of layers.
    """
    files = {path for path, _ in frames}
    if _in(files, "activations/offload.py", "pipeline_parallel/p2p_communication.py"):
        return SAVED
    if not _is_forward(frames):
        return WORKING
    if _in(files, "attention/rope.py") and not _in(files, "mcore/model/layer.py"):
        return ROTARY
    return SAVED if _in(files, *_LAYERS) else WORKING


def phase_of(frames: tuple[Frame, ...]) -> str:
    names = {name for _, name in frames}
    if _is_forward(frames):
        return "forward"
    if "_loss" in names:
        return "loss head"
    return "update" if "update" in names else "backward"


def peak(events: Iterable[Event], standing: Mapping[str, int]) -> Peak:
    """standing: bytes of each category before the first event.  If an event frees such bytes, they are subtracted from
    "other".

    Blocks of 5 and 3 are allocated, then the block of 5 is freed; 10 bytes are standing -> 18
    """
    alive: dict[int, tuple[int, str, tuple[Frame, ...]]] = {}
    now: Counter[str] = Counter(standing)
    total, most = 0, 0
    best, where, kept = dict(now), "", list[tuple[int, str, tuple[Frame, ...]]]()
    for event in events:
        if event.num_bytes < 0:
            if block := alive.pop(event.address, None):
                now[block[1]] -= block[0]
                total -= block[0]
            elif OTHER in standing:
                now[OTHER] += event.num_bytes
                total += event.num_bytes
            continue
        # freed by a thread that is not recorded, such as a thread of gloo
        if earlier := alive.pop(event.address, None):
            now[earlier[1]] -= earlier[0]
            total -= earlier[0]
        block = event.num_bytes, category_of(event.frames), event.frames
        alive[event.address] = block
        now[block[1]] += block[0]
        total += block[0]
        if total > most:
            most, best, where = total, dict(now), phase_of(event.frames)
            kept = list(alive.values())
    return Peak({name: size for name, size in best.items() if size}, where, _largest(kept))


def _largest(blocks: list[tuple[int, str, tuple[Frame, ...]]]) -> list[tuple[int, str]]:
    sizes: Counter[str] = Counter()
    for size, category, frames in blocks:
        ours = [f"{path.rpartition('/')[2]}:{name}" for path, name in frames if "sft/" in path][:3]
        sizes[f"{category} < {' < '.join(ours)}"] += size
    return [(size, name) for name, size in sizes.most_common(14)]


def _is_forward(frames: tuple[Frame, ...]) -> bool:
    return any(name == "_forward_step" and path.endswith("mcore/engine.py") for path, name in frames)


def _in(files: set[str], *endings: str) -> bool:
    return any(path.endswith(endings) for path in files)
