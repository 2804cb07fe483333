"""Keys of the profiler: which steps of which ranks are recorded."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sft.config.section import NonNegative, Positive, Section, refuse

Steps = Annotated[list[Positive], Field(min_length=1)]
Ranks = Literal["all", "stage"] | Annotated[list[NonNegative], Field(min_length=1)]


class MemoryProfile(Section):
    steps: Steps | None = None
    """Steps, the first is 1, after which every chosen rank writes its CUDA memory history; null records none."""
    max_entries: Positive = 100000
    """Newest allocations and frees that a rank keeps; several KB each with their stacks."""
    ranks: Ranks = "all"
    """Who records: all, one rank per pipeline stage (dp, cp and tp 0), or ranks by number."""

    @model_validator(mode="after")
    def _chosen(self) -> "MemoryProfile":
        refuse(*_badly_chosen(self.steps, self.ranks))
        unused = self.steps is None and self.max_entries != 100000
        refuse((unused, "max_entries", "has no effect without steps; name some"))
        return self


class TorchProfile(Section):
    steps: Steps | None = None
    """Steps, the first is 1, of which every chosen rank writes a Chrome trace; null traces none."""
    ranks: Ranks = "all"
    """Who traces: all, one rank per pipeline stage (dp, cp and tp 0), or ranks by number."""

    @model_validator(mode="after")
    def _chosen(self) -> "TorchProfile":
        refuse(*_badly_chosen(self.steps, self.ranks))
        return self


def _badly_chosen(steps: list[int] | None, ranks: str | list[int]) -> list[tuple[bool, str, str]]:
    """Cases for `refuse`: something named twice, or ranks that nothing is recorded on."""
    cases = [(steps is None and ranks != "all", "ranks", "has no effect without steps; name some")]
    for field, numbers in (("steps", steps), ("ranks", ranks)):
        if isinstance(numbers, list):
            repeated = [number for i, number in enumerate(numbers) if number in numbers[:i]]
            cases += [(True, field, f"names {number} twice; name it once") for number in repeated[:1]]
    return cases


class ProfileConfig(Section):
    memory: MemoryProfile = MemoryProfile()
    """CUDA memory history, for torch's viewer; see docs/profiling.md."""
    torch: TorchProfile = TorchProfile()
    """Chrome traces of torch.profiler, for ui.perfetto.dev."""

    @model_validator(mode="after")
    def _one_instrument_per_step(self) -> "ProfileConfig":
        both = sorted(set(self.memory.steps or ()) & set(self.torch.steps or ()))
        why = (
            f"shares step {', '.join(map(str, both))} with profile.memory.steps, and each would distort the other: "
            "recording stacks slows the launches that are traced, and the profiler allocates.  Choose other steps"
        )
        refuse((bool(both), "torch.steps", why))
        return self
