"""Keys of the run and its output: folder, device, time limits, log and profiles."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from sft.config.section import UNREPORTED, NonNegative, Path, Positive, Section

Steps = Annotated[list[Positive], Field(min_length=1)]
Ranks = Literal["all", "stage"] | Annotated[list[NonNegative], Field(min_length=1)]


class RunConfig(Section):
    dir: Path = Field(json_schema_extra=UNREPORTED)
    """Folder of recipe.yaml, data.json, metrics.jsonl, tensorboard/, checkpoints/.  Each run needs its own folder."""
    device: Literal["auto", "cuda", "cpu"] = Field("auto", json_schema_extra=UNREPORTED)
    """auto is cuda if torch finds a GPU.  The CPU supports every kind of parallelism, with gloo."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps main parameters and gradients in fp32.  fp32 is for comparisons and CPU runs."""
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """FP8 recipe of linear layers; needs Transformer Engine and bf16.  null: no FP8.  Not yet run on GPUs."""
    modules: Literal["auto", "te", "local"] = "auto"
    """Linear layers and experts: te (Transformer Engine; CUDA, bf16), local (megatron-core), or auto: te where it
    runs."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Random seed of initial weights and of the order of data."""
    deterministic: bool = False
    """Use only algorithms whose results repeat bit for bit on a GPU; slower.  A CPU repeats them without it."""
    timeout_s: Positive = Field(1800, json_schema_extra=UNREPORTED)
    """Seconds that a rank may wait for another rank, also while rank 0 reads the data files at the start."""
    progress_timeout_s: Positive | None = Field(1800, json_schema_extra=UNREPORTED)
    """Seconds that a pass of a microbatch or a save may take.  A longer one ends the run and prints all stacks; null:
    no limit."""
    exit_after_minutes: Annotated[float, Field(gt=0.0)] | None = Field(None, json_schema_extra=UNREPORTED)
    """Minutes after which the run saves and exits; null: no limit.  A SLURM job also does so grace_s before its end."""
    grace_s: Positive = Field(100, json_schema_extra=UNREPORTED)
    """Seconds from a stop signal to the end of the process.  A step and a save must finish within this time."""


class LogConfig(Section):
    every: Positive = 1
    """Steps between lines on the console.  metrics.jsonl and TensorBoard record every step."""
    tensorboard: bool = True
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Project at Weights & Biases; null: none.  Environment variables WANDB_* set account and server."""
    mlflow: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Experiment of MLflow; null: none.  MLFLOW_TRACKING_URI sets the server or database."""
    trackio: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Project of trackio; null: none.  TRACKIO_DIR or TRACKIO_SPACE_ID sets where it keeps the numbers."""
    prometheus_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port at which rank 0 serves the newest numbers as Prometheus text, on all interfaces; null: none."""
    position_edges: list[Positive] = [4096, 16384, 65536]
    """Edges of ranges of positions in a document; the loss is also logged for each range."""
    peak_tflops: Annotated[float, Field(gt=0.0)] | None = None
    """Peak dense TFLOPS of one GPU in the run's precision (H100 SXM bf16: 989), for MFU; null: that of the
    GPU in bf16 if `sft plan --gpu` lists it, and otherwise no MFU is logged."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.position_edges != sorted(set(self.position_edges)):
            yield "position_edges", "must increase, as in [4096, 16384]"


class MemoryProfile(Section):
    steps: Steps | None = None
    """Steps, from 1, after which each chosen rank writes its CUDA memory history; null: none."""
    max_entries: Positive = 100000
    """Number of newest allocations and frees that a rank records; each takes several KB of host memory."""
    ranks: Ranks = "all"
    """Ranks that record memory: all ranks, a list, or stage (dp, cp and tp rank 0 of each pipeline stage)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from _badly_chosen(self.steps, self.ranks)
        if self.steps is None and "max_entries" in self.changed:
            yield "max_entries", "has no effect without steps; give steps"


class TorchProfile(Section):
    steps: Steps | None = None
    """Steps, from 1, for which each chosen rank writes a Chrome trace; null: none."""
    ranks: Ranks = "all"
    """Ranks that write traces: all ranks, a list, or stage (dp, cp and tp rank 0 of each pipeline stage)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        return _badly_chosen(self.steps, self.ranks)


def _badly_chosen(steps: list[int] | None, ranks: str | list[int]) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) if a step or rank is named twice, or if ranks are given without steps."""
    if steps is None and ranks != "all":
        yield "ranks", "has no effect without steps; give steps"
    for field, numbers in (("steps", steps), ("ranks", ranks)):
        if isinstance(numbers, list):
            repeated = [number for i, number in enumerate(numbers) if number in numbers[:i]]
            yield from ((field, f"contains {number} twice; remove one") for number in repeated[:1])


class ProfileConfig(Section):
    memory: MemoryProfile = MemoryProfile()
    """CUDA memory history, for torch's viewer; see docs/how-to/profiling.md."""
    torch: TorchProfile = TorchProfile()
    """Chrome traces of torch.profiler, for ui.perfetto.dev."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if both := sorted(set(self.memory.steps or ()) & set(self.torch.steps or ())):
            yield "torch.steps", (
                f"shares step {', '.join(map(str, both))} with profile.memory.steps.  Memory recording slows the "
                "traced launches, and tracing allocates memory.  Choose other steps"
            )
