"""Keys of the run itself and of what it writes: its folder and device, how long it may take, its log, its profiles."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from sft.config.section import UNREPORTED, NonNegative, Path, Positive, Section

Steps = Annotated[list[Positive], Field(min_length=1)]
Ranks = Literal["all", "stage"] | Annotated[list[NonNegative], Field(min_length=1)]


class RunConfig(Section):
    dir: Path = Field(json_schema_extra=UNREPORTED)
    """Folder of this run: recipe.yaml, data.json, metrics.jsonl, tensorboard/, checkpoints/.  One run, one folder."""
    device: Literal["auto", "cuda", "cpu"] = Field("auto", json_schema_extra=UNREPORTED)
    """auto takes CUDA where torch sees it.  The CPU runs every parallelism, on gloo."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps main parameters and gradients in fp32.  fp32 is for comparisons and CPU runs."""
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """FP8 recipe of the linear layers (not yet run on GPUs); needs Transformer Engine and precision bf16."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seeds initial weights and the order of the data."""
    timeout_s: Positive = Field(1800, json_schema_extra=UNREPORTED)
    """Seconds a rank may wait for another, also at the start, while rank 0 reads the data files once."""
    step_timeout_s: Positive | None = Field(1800, json_schema_extra=UNREPORTED)
    """Seconds after which a step, evaluation or save counts as hung: every rank writes its stacks, and the run ends."""
    exit_after_minutes: Annotated[float, Field(gt=0.0)] | None = Field(None, json_schema_extra=UNREPORTED)
    """Minutes after which the run saves and exits; under SLURM it also does so run.grace_s before the job's end."""
    grace_s: Positive = Field(100, json_schema_extra=UNREPORTED)
    """Seconds between a signal to stop and the end of the process; a step and a save must fit into them."""


class LogConfig(Section):
    every: Positive = 1
    """Steps between lines on the console; metrics.jsonl and TensorBoard get every step."""
    tensorboard: bool = True
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Project at Weights & Biases to log to; WANDB_* variables hold the rest.  null logs nothing there."""
    position_edges: list[Positive] = [4096, 16384, 65536]
    """The loss is also logged by position in the document: below the first edge, between two, above the last."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Dense peak of one GPU in the run's precision (H100 SXM bf16: 989), for MFU; null leaves MFU out."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.position_edges != sorted(set(self.position_edges)):
            yield "position_edges", "must increase, as in [4096, 16384]"


class MemoryProfile(Section):
    steps: Steps | None = None
    """Steps, the first is 1, after which every chosen rank writes its CUDA memory history; null records none."""
    max_entries: Positive = 100000
    """Newest allocations and frees that a rank keeps; several KB each with their stacks."""
    ranks: Ranks = "all"
    """Who records: all, one rank per pipeline stage (dp, cp and tp 0), or ranks by number."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from _badly_chosen(self.steps, self.ranks)
        if self.steps is None and self.max_entries != 100000:
            yield "max_entries", "has no effect without steps; name some"


class TorchProfile(Section):
    steps: Steps | None = None
    """Steps, the first is 1, of which every chosen rank writes a Chrome trace; null traces none."""
    ranks: Ranks = "all"
    """Who traces: all, one rank per pipeline stage (dp, cp and tp 0), or ranks by number."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        return _badly_chosen(self.steps, self.ranks)


def _badly_chosen(steps: list[int] | None, ranks: str | list[int]) -> Iterator[tuple[str, str]]:
    """Conflicts of something named twice, or of ranks that nothing is recorded on."""
    if steps is None and ranks != "all":
        yield "ranks", "has no effect without steps; name some"
    for field, numbers in (("steps", steps), ("ranks", ranks)):
        if isinstance(numbers, list):
            repeated = [number for i, number in enumerate(numbers) if number in numbers[:i]]
            yield from ((field, f"names {number} twice; name it once") for number in repeated[:1])


class ProfileConfig(Section):
    memory: MemoryProfile = MemoryProfile()
    """CUDA memory history, for torch's viewer; see docs/profiling.md."""
    torch: TorchProfile = TorchProfile()
    """Chrome traces of torch.profiler, for ui.perfetto.dev."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if both := sorted(set(self.memory.steps or ()) & set(self.torch.steps or ())):
            yield "torch.steps", (
                f"shares step {', '.join(map(str, both))} with profile.memory.steps, and each would distort the other: "
                "recording stacks slows the launches that are traced, and the profiler allocates.  Choose other steps"
            )
