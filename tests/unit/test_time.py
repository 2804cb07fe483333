"""The estimated time of a step, and the limits with which `sft check` compares it.  Expected values by hand."""

import pytest

from sft.config import Config, LogConfig
from sft.estimate import time
from sft.parallel.layout import Layout
from tests.builders import LLAMA_8B, layout_config

# Llama-8B.  Per token 32 layers x (4096 x (2 x 4096 + 2 x 1024) + 3 x 4096 x 14,336) = 6,979,321,856 products, x 6.
# Per supervised token 128,256 x 4096 x 6.  Per token and token of its document 6 x 32 x 4096.
MILLION = 1_048_576
LAYERS, HEAD = MILLION * (41_875_931_136 + MILLION * 786_432), MILLION * 3_152_019_456
VOCAB = 128_256
NOW = 1_000_000.0


def of(world_size: int = 8, **sections: dict[str, object]) -> tuple[Config, Layout]:
    """The case of 8 packs of a million tokens on 8 GPUs, changed by `sections`."""
    base: dict[str, dict[str, object]] = {
        "model": LLAMA_8B,
        "data": {"seq_length": MILLION},
        "parallel": {"cp": 8},
        "train": {"global_batch_size": 8},
    }
    config = layout_config(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})
    return config, Layout.resolve(config, world_size)


def estimated(longest: int = MILLION, **case: dict[str, object]) -> time.StepTime:
    found = time.estimate(*of(**case), VOCAB, longest)
    assert found is not None
    return found


def described(**case: dict[str, object]) -> list[str]:
    return time.describe(*of(**case), VOCAB, MILLION, {}, NOW)


def test_a_step_of_a_million_tokens() -> None:
    """(LAYERS + HEAD) / (8 x 0.35 x 989e12) = 9.1191e17 / 2.7692e15 = 329.3 s, and 8 microbatches."""
    found = estimated()
    assert found.microbatch_s == pytest.approx(329.3032, rel=1e-6)
    assert found.step_s == pytest.approx(2634.4254, rel=1e-6)


@pytest.mark.parametrize(
    ("sections", "microbatch_s", "step_s"),
    [
        ({"parallel": {"cp": 4}}, 658.6064, 2634.4254),  # dp 2, 4 microbatches each
        ({"parallel": {"cp": 4, "tp": 2}}, 329.3032, 2634.4254),
        # 4 stages, cp 2: a pack takes 1317.2 s through all of them, and the last stage waits for 3 of 8 + 3 turns.
        ({"parallel": {"cp": 2, "pp": 4}}, 1317.2127, 1317.2127 / 4 * 11),
        ({"parallel": {"cp": 2, "pp": 4, "virtual_stages": 2}}, 1317.2127, 1317.2127 / 4 * 9.5),
        ({"train": {"recompute": "full"}}, 438.6731, 3509.3845),  # (4/3 LAYERS + HEAD) / 2.7692e15
        ({"train": {"global_batch_size": 16}}, 329.3032, 5268.8508),
    ],
)
def test_layouts(sections: dict[str, dict[str, object]], microbatch_s: float, step_s: float) -> None:
    found = estimated(**sections)
    assert found.microbatch_s == pytest.approx(microbatch_s, rel=1e-6)
    assert found.step_s == pytest.approx(step_s, rel=1e-6)


def test_short_documents_take_less() -> None:
    """Packs full of documents of 8,192: a million x (41,875,931,136 + 8,192 x 786,432 + 3,152,019,456)."""
    assert estimated(8192).microbatch_s == pytest.approx(1_048_576 * 51_470_401_536 / 2.7692e15, rel=1e-6)


def test_the_peak_of_the_device() -> None:
    config, layout = of()
    slow = config.model_copy(update={"log": LogConfig(peak_tflops=494.5)})
    found = time.estimate(slow, layout, VOCAB, MILLION)
    assert found is not None and found.microbatch_s == pytest.approx(2 * 329.3032, rel=1e-6)
    for unknown in ({"precision": "fp32"}, {"device": "cpu"}):
        assert time.describe(*of(run=unknown), VOCAB, MILLION, {}, NOW) == [
            "not estimated: the peak of the device is unknown; log.peak_tflops sets it"
        ]


def test_the_step_lasts_longer_than_the_limit_of_a_microbatch() -> None:
    """And is not warned of for that, but for run.grace_s."""
    assert described() == [
        "estimated and not measured: a step 2,634 s, a microbatch 329 s, if packs of 1,048,576 tokens hold documents "
        "of 1,048,576",
        "assumed: 35% of 989 TFLOP/s (H100 SXM; log.peak_tflops sets the peak)",
        "WARNING: run.grace_s = 100 is shorter than a step, about 2,634 s, and a save: after a stop signal the run "
        "would end without a save.  Raise it, and with it the time that the launcher gives "
        "(TORCH_ELASTIC_SHUTDOWN_TIMEOUT, sbatch --signal), or lower train.global_batch_size.",
    ]


def warned(lines: list[str]) -> list[str]:
    return [line.removeprefix("WARNING: ").split(" is shorter")[0] for line in lines if line.startswith("WARNING: ")]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"grace_s": 2635}, []),
        ({"grace_s": 2634}, ["run.grace_s = 2634"]),
        ({"grace_s": 2635, "progress_timeout_s": 330}, []),
        ({"grace_s": 2635, "progress_timeout_s": 329}, ["run.progress_timeout_s = 329"]),
        ({"grace_s": 2635, "progress_timeout_s": None}, []),
        ({"grace_s": 2635, "timeout_s": 659}, []),
        ({"grace_s": 2635, "timeout_s": 658}, ["run.timeout_s = 658"]),
        ({"grace_s": 2635, "exit_after_minutes": 44.0}, []),
        ({"grace_s": 2635, "exit_after_minutes": 43.0}, ["run.exit_after_minutes = 43 leaves 2,580 s, which"]),
    ],
)
def test_each_limit(limits: dict[str, object], expected: list[str]) -> None:
    assert warned(described(run=limits)) == expected


@pytest.mark.parametrize(("end", "expected"), [(1_005_270, []), (1_005_269, ["leaves 2,634 s, which"])])
def test_the_end_of_a_slurm_job(end: int, expected: list[str]) -> None:
    """run.grace_s before the end of the job, the run stops."""
    case = of(run={"grace_s": 2635})
    lines = time.describe(*case, VOCAB, MILLION, {"SLURM_JOB_END_TIME": str(end)}, NOW)
    assert warned(lines) == [f"SLURM_JOB_END_TIME - run.grace_s = 2635 {text}" for text in expected]
