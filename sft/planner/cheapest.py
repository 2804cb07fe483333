"""If no layout fits, finds the changes that make a task fit, the cheapest first.  All numbers are predictions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from sft.config import Config, yaml
from sft.errors import ConfigError
from sft.estimate import constants
from sft.estimate.gpus import GPUS
from sft.estimate.memory import Memory
from sft.planner.search import Search
from sft.planner.subject import lora_keys
from sft.planner.task import Choice, Proposal, Task
from sft.weights.trained import trained_weights

_MOST_GPUS = 64  # the largest factor by which a change multiplies the number of GPUs
_LENGTHS = 16  # the search tries packs of k / 16 of the length, for whole k


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change after which a layout fits.

    setting   the change, `data.seq_length=131072`
    task      the task after the change
    proposal  the best proposal after the change
    """

    setting: str
    task: Task
    proposal: Proposal

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds for a million tokens."""
        return 1e6 / self.proposal.time.tokens_per_gpu_s


def changes(task: Task, num_gpus: int) -> list[Change]:
    """The changes after which a layout fits, one setting each.  The change with the fewest GPU seconds comes first."""
    fitting = [change for kind in (_lora, _shorter, _more_gpus, _larger_gpu) for change in kind(task, num_gpus)]
    return sorted(fitting, key=lambda change: change.gpu_seconds)


def _first(setting: str, task: Task, num_gpus: int, memories: dict[Choice, Memory] | None = None) -> Change | None:
    """The change `setting` with its best proposal; None if nothing fits.  memories: as in `Search`"""
    proposals = Search(task, num_gpus, {} if memories is None else memories).best(1)
    return Change(setting=setting, task=task, proposal=proposals[0]) if proposals else None


def with_adapters(task: Task) -> Task | None:
    """The task with LoRA instead of training all weights; None if the recipe refuses these settings."""
    sections = {name: getattr(task.config, name) for name in type(task.config).model_fields}
    try:
        config = Config.model_validate(sections | {"lora": lora_keys(task.config.model)})
        return task.changed(config=config, trained=trained_weights(config, task.vocab_size))
    except (ValidationError, ConfigError):
        return None


def _lora(task: Task, num_gpus: int) -> Iterator[Change]:
    config = task.config
    if not config.lora.is_used and not config.train.freeze and not config.optim.groups:
        adapted = with_adapters(task)
        if adapted is None:
            return
        lora = adapted.config.lora
        excluded = f" lora.exclude={yaml.write(lora.exclude)}" if lora.exclude else ""
        if change := _first(f"LoRA (lora.rank={lora.rank}{excluded}) instead of all weights", adapted, num_gpus):
            yield change


def _shorter(task: Task, num_gpus: int) -> Iterator[Change]:
    """Yield the change to the longest packs that fit, among multiples of 1/16 of the length."""
    low, high, best = 0, _LENGTHS, None
    while high - low > 1:
        middle = (low + high) // 2
        length = task.config.data.seq_length * middle // _LENGTHS
        change = _first(f"data.seq_length={length}", task.with_length(length), num_gpus)
        low, high = (middle, high) if change else (low, middle)
        best = change or best
    if best:
        yield best


def _more_gpus(task: Task, num_gpus: int) -> Iterator[Change]:
    times = 2
    while times <= _MOST_GPUS:
        if change := _first(f"--gpus {times * num_gpus}", task, times * num_gpus):
            yield change
            return
        times *= 2


def _larger_gpu(task: Task, num_gpus: int) -> Iterator[Change]:
    """Yield the change to the GPU with the least memory on which the task fits."""
    hardware, memories = task.hardware, dict[Choice, Memory]()
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes > hardware.gpu.memory_bytes:
            measured = constants.constants_of(gpu, hardware.constants.inter_gb_s.value)
            other = replace(hardware, gpu=gpu, constants=measured)
            if change := _first(f"--gpu {gpu.name}", task.changed(hardware=other), num_gpus, memories):
                yield change
                return
