"""Collectives of messages: results, errors, and a foreign process that has connected as a rank."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sft.errors import ConfigError, DataError
from sft.parallel import collectives
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0, through_rank0
from tests.builders import Hostile
from tests.ranks.pool import Ranks, joined


def test_results_and_errors_are_the_same_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(each_collective)
    assert first["broadcast"] == second["broadcast"] == [Path("of 0")]
    assert first["gathered"] == second["gathered"] == [("rank", 0), ("rank", 1)]
    assert (first["through"], second["through"]) == (10, 11)
    assert first["errors"] == second["errors"]
    assert first["errors"] == ["DataError: broadcast", "DataError: gathered", "DataError: made", "DataError: decided"]


def each_collective() -> dict[str, Any]:
    with joined():
        rank, group, errors = dist.get_rank(), dist.group.WORLD, []
        assert group is not None

        def refuse(text: str, of: int) -> Any:
            if rank == of:
                raise DataError(text)

        def decide(results: list[Any]) -> list[Any]:
            raise DataError("decided")

        for call in (
            lambda: broadcast_from_rank0(lambda: refuse("broadcast", 0), group),
            lambda: all_gather_objects(lambda: refuse("gathered", 1), group),
            lambda: through_rank0(lambda: refuse("made", 1), lambda results: results, group),
            lambda: through_rank0(lambda: 1, decide, group),
        ):
            try:
                call()
            except DataError as error:
                errors.append(f"{type(error).__name__}: {error}")
        answers = {
            "broadcast": broadcast_from_rank0(lambda: [Path(f"of {rank}")], group),
            "gathered": all_gather_objects(lambda: ("rank", rank), group),
            "through": through_rank0(lambda: rank, lambda of_ranks: [10 + of for of in of_ranks], group),
            "errors": errors,
        }
        return answers


def test_a_stranger_in_place_of_a_rank_runs_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 is a foreign process.  It speaks gloo, and sends a pickle instead of a message, or a length without
    bound."""
    first, _ = ranks(2).run(meet_a_stranger, str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()
    start = "ConfigError: rank 1 sent bytes that are no message of this program: "
    assert [text[: len(start)] for text in first[:2]] == [start, start]
    size = "ConfigError: rank 1 announced a message of 1,125,899,906,842,624 bytes.  The message was not used.  All "
    assert [text[: len(size)] for text in first[2:]] == [size, size]


def meet_a_stranger(folder: str) -> list[str]:
    with joined():
        group, refusals = dist.group.WORLD, []
        assert group is not None
        for is_endless in (False, True):
            for call in (all_gather_objects, lambda make, group: through_rank0(make, lambda results: results, group)):
                if dist.get_rank() == 0:
                    try:
                        call(lambda: 0, group)
                    except ConfigError as error:
                        refusals.append(f"ConfigError: {error}")
                    continue
                payload = pickle.dumps(Hostile(folder))
                sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
                dist.all_gather(sizes, torch.tensor([2**50 if is_endless else len(payload)]), group=group)
                if is_endless:
                    continue
                longest = int(max(sizes))
                buffer = collectives._buffer(payload, longest)
                if call is all_gather_objects:
                    dist.all_gather([torch.empty_like(buffer) for _ in range(2)], buffer, group=group)
                    continue
                dist.gather(buffer, None, 0, group=group)
                answer_sizes = torch.zeros(2, dtype=torch.int64)
                dist.broadcast(answer_sizes, 0, group=group)
                dist.scatter(torch.zeros(int(answer_sizes.max()), dtype=torch.uint8), None, 0, group=group)
        return refusals


@pytest.mark.parametrize("sizes", [[0], [-1], [2**62], [3 << 30, 1]])
def test_a_size_that_is_too_large_is_refused_before_anything_is_allocated(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="rank 0 announced a message of "):
        collectives._checked(sizes)
    assert collectives._checked([2 << 30, 1]) == [2 << 30, 1]
