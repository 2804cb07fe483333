"""Whole runs of recipes/demo.yaml on "cuda", in several layouts: exit codes and checkpoints.  Also runs tests of
tests/gpu that do not depend on computed numbers."""

import pickle
import re
import signal
import time
from pathlib import Path

import pytest

from sft.estimate.gpus import CONTEXT_BYTES
from sft.run.outcome import STOPPED
from tests.builders import chats
from tests.launching import records
from tests.standin import launch

STEPS = 3
ROUNDING = 0.02  # GiB; the log has two decimals
RECIPE = "recipes/demo.yaml"
DEMO = (
    "run.device=cuda",
    "run.precision=bf16",
    "model.head_dim=64",  # a head size that the flash kernel supports
    "model.num_layers=4",
    "data.seq_length=2048",
    "train.num_epochs=null",
    "train.eval_every=2",
    "checkpoint.save_every=null",
    "log.tensorboard=false",
)
SHARDED = "parallel.distributed_optimizer=true"
CP, TP = ["parallel.cp=2"], ["parallel.cp=1", "parallel.tp=2", "parallel.sequence_parallel=true", SHARDED]
PP, VIRTUAL = ["parallel.cp=1", "parallel.pp=2", "train.global_batch_size=4"], "parallel.virtual_stages=2"
WINDOWS = ["model.sliding_window=128", "model.sliding_window_layers=[1, 3]", "train.recompute=selective"]
GATED = ["model.activation=clamped_swiglu", "model.activation_limit=7", "model.activation_alpha=1.7"]
# What Gemma and others have and every backend computes.
SHARED = ["model.norm_zero_centered=true", "model.logits_softcap=30", "model.rope.fraction=0.5"]


LATENT = ["model.qk_norm=false", "model.head_dim=null", "model.num_query_groups=null", "model.rope.interleaved=true"]
LATENT += ["model.latent_attention={kv_lora_rank: 64, q_lora_rank: 96}"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name prepared data."""
    folder = tmp_path_factory.mktemp("data")
    chats(folder, 400)
    chats(folder, 60, "held_out.jsonl")
    found = [f"data.train={folder}/chat.jsonl", f"data.eval={folder}/held_out.jsonl", f"data.cache_dir={folder}/cache"]
    process = launch.start("sft", "data", "prepare", RECIPE, *DEMO, *found, "train.num_steps=1")
    said = launch.finish(process)
    assert process.returncode == 0, said
    return found


def command(folder: Path, *overrides: str, steps: int = STEPS) -> list[str]:
    settings = [*DEMO, launch.PORTABLE, *overrides, f"run.dir={folder}/run", f"train.num_steps={steps}"]
    return ["tests.standin.answers", "train", RECIPE, *settings]


def runs(folder: Path, *overrides: str, ranks: int, steps: int = STEPS) -> str:
    """Runs the trainer to its last step, and checks that the last step has a checkpoint."""
    process = launch.start(*command(folder, *overrides, steps=steps), ranks=ranks)
    said = launch.finish(process)
    assert process.returncode == 0, said[-6000:]
    assert saved(folder) == steps
    return said


def saved(folder: Path) -> int:
    """The step of the last checkpoint with a final name."""
    step = int((folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert (folder / f"run/checkpoints/iter_{step:07d}/.metadata").exists()
    return step


RUNS = {
    "dp": (2, ["parallel.cp=1", "train.global_batch_size=2", SHARDED]),
    "pp": (2, [*PP, VIRTUAL, "train.recompute=selective", "train.offload_fraction=0.5"]),
    "dynamic cp": (2, [*CP, "parallel.dynamic_cp=true"]),
    # torch raises an error where an operator has no deterministic algorithm.
    "deterministic, cp": (2, [*CP, "run.deterministic=true", "train.recompute=selective"]),
    "deterministic, tp": (2, [*TP, "run.deterministic=true", "train.recompute=full"]),
    "adapters": (2, [*PP, "lora.rank=8", "train.recompute=full"]),
    "windows, sinks": (2, [*CP, *WINDOWS, "model.attention_sinks=true", "model.mlp_bias=true", *GATED]),
    "windows, caps": (2, [*TP, *WINDOWS, "model.attention_softcap=50", "model.norm_placement=both", *SHARED]),
    "sharded weights": (
        2,
        [*CP, SHARDED, "parallel.shard=weights", "train.recompute=full", "train.offload_fraction=1"],
    ),
    "windows, kept": (2, [*CP, *WINDOWS, "train.recompute=attention_kept", "train.offload_fraction=0.5"]),
    "offloaded optimizer": (1, ["parallel.cp=1", SHARDED, "optim.offload_fraction=0.5"]),
}
RUNS_OF_TE = {
    "te, heads in two levels": (4, ["parallel.cp=4", "parallel.cp_comm=a2a+p2p", "parallel.cp_a2a=2"]),
    "te, dynamic cp": (4, ["parallel.cp=4", "parallel.dynamic_cp=true", "train.global_batch_size=2"]),
    "te, all at once": (2, [*TP, "train.recompute=selective", "train.offload_fraction=0.5", "train.mlp_tile=500"]),
    "te, kept, blockwise": (2, [*CP, "train.recompute=attention_kept", "run.fp8=blockwise"]),
    "te, latents, kept": (2, [*TP, *LATENT, "train.recompute=attention_kept", "train.offload_fraction=0.5"]),
    "te, delayed": (2, ["parallel.cp=2", "run.fp8=delayed", "train.recompute=full"]),
    "te, blockwise": (1, ["parallel.cp=1", "run.fp8=blockwise"]),
    "te, caps, delayed": (2, ["parallel.cp=2", *SHARED, "model.rope.skip_layers=[2]", "run.fp8=delayed"]),
    "te, adapters": (2, [*TP, "lora.rank=8", "train.recompute=full"]),
    "te, latents": (2, [*TP, *LATENT, "train.recompute=selective", "train.offload_fraction=0.5"]),
    "te, latents, dynamic cp": (2, [*CP, *LATENT, "parallel.dynamic_cp=true"]),
    "te, latents, delayed": (2, [*CP, *LATENT, "parallel.cp_comm=a2a", "run.fp8=delayed", "train.recompute=full"]),
    "te, adapters, delayed": (2, ["parallel.cp=2", "run.fp8=delayed", "lora.rank=8", "train.recompute=selective"]),
}


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=launch.NEEDS_TE) for name in RUNS_OF_TE)])
def test_a_run_comes_to_its_end(tmp_path: Path, data: list[str], name: str) -> None:
    is_te = name in RUNS_OF_TE
    ranks, overrides = (RUNS_OF_TE if is_te else RUNS)[name]
    said = runs(tmp_path, *data, *overrides, launch.TE if is_te else launch.PORTABLE, ranks=ranks)
    assert f"attention {'te' if is_te else 'portable'}" in said
    warned = re.search(r"\nWARNING: \w+ attention: .* FlashAttention-4 would be faster", said)
    assert (warned is None) is is_te  # flash-attn-4 is not installed, and the stand-in is of compute capability 9.0
    _check_communicators(said, opens_all="dynamic cp" not in name)  # the first step of these has no long documents


def _check_communicators(said: str, opens_all: bool) -> None:
    """The communicators that a step opened are those of sft/estimate/communicators.py.  The stand-in takes the assumed
    bytes for each, and none for CUDA's context."""
    (found,) = re.findall(r"outside of torch's allocator: ([\d.]+) GiB .* assume ([\d.]+)", said)
    measured, assumed = map(float, found)
    buffers = assumed - CONTEXT_BYTES / 2**30
    assert measured <= buffers + ROUNDING and (measured >= buffers - ROUNDING or not opens_all), said[-6000:]


def test_a_run_sets_the_allocator_where_the_user_does_not(tmp_path: Path, data: list[str]) -> None:
    """Started by torchrun alone, without the scripts of launch/."""
    said = runs(tmp_path, *data, "parallel.cp=1", "profile.memory.steps=[2]", ranks=1)
    (snapshot,) = (tmp_path / "run/memory_snapshots/step_2").glob("*.pickle")
    segments = pickle.loads(snapshot.read_bytes())["segments"]
    assert segments and all(segment["is_expandable"] for segment in segments)
    assert "\nenvironment PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, " in said


# Page-locked bytes that the driver allows.  The copy of 8M parameters has 107 MiB, and their optimizer needs 61.
TOO_LITTLE = {"STANDIN_LOCKABLE": str(48 << 20)}
WIDER = ["parallel.cp=1", "model.hidden_size=512", "model.ffn_hidden_size=1024", SHARDED]
REFUSED = r"[\d.]+ MiB of host memory cannot be page-locked: CUDA reports: out of memory \(2\)\.  "


def test_without_page_locked_memory_training_goes_on(tmp_path: Path, data: list[str]) -> None:
    """The error of CUDA does not appear again in a later kernel.  Saves fail: torch's writer locks memory, too."""
    words = command(tmp_path, *data, *WIDER, "checkpoint.save_every=1")
    process = launch.start(*words, also=TOO_LITTLE)
    said = launch.finish(process)
    warning = rf"\nWARNING: rank 0 has too little memory for a copy of its tensors: {REFUSED}From now on training waits"
    assert re.search(warning, said) and f"\nstep {STEPS}/{STEPS}" in said, said[-6000:]
    assert "in the background" not in said


def test_an_optimizer_whose_memory_cannot_be_locked_is_refused(tmp_path: Path, data: list[str]) -> None:
    words = command(tmp_path, *data, *WIDER, "optim.offload_fraction=1")
    process = launch.start(*words, also=TOO_LITTLE)
    said = launch.finish(process)
    assert process.returncode == 1 and "Traceback" not in said, said[-6000:]
    assert re.search(rf"optim.offload_fraction: {REFUSED}The block holds .* Use a smaller fraction, more ranks", said)


def test_a_run_goes_on_with_another_layout(tmp_path: Path, data: list[str]) -> None:
    runs(tmp_path, *data, *CP, ranks=2)
    said = runs(tmp_path, *data, *TP, ranks=2, steps=STEPS + 2)
    assert f"\nstep {STEPS + 1}" in said and f"\nstep {STEPS} " not in said, said[-6000:]


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path: Path, data: list[str]) -> None:
    process = launch.start(*command(tmp_path, *data, "parallel.cp=1", steps=100_000))
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run/metrics.jsonl").exists() or not records(tmp_path, "train"):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(launch.finish(process, 1)[-6000:])
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = launch.finish(process, 120)
    finally:
        launch.end(process)
    assert process.returncode == STOPPED, said[-6000:]
    assert saved(tmp_path) >= 1


GPU_TESTS = (
    "tests/gpu/test_memory.py::test_gradients_do_not_notice",
    "tests/gpu/test_memory.py::test_bytes_of_a_layer",
    "tests/gpu/test_memory.py::test_an_end_for_want_of_memory_leaves_a_snapshot",
    "tests/gpu/test_training.py::test_a_gpu_is_not_waited_for_within_the_passes",
    "tests/gpu/test_training.py::test_the_share_leaves_the_device",
)


def test_tests_of_gpus_pass() -> None:
    process = launch.start("pytest", "-q", "-p", "no:cacheprovider", *GPU_TESTS)
    said = launch.finish(process)
    passed = 22 if launch.HAS_TE else 16
    assert process.returncode == 0 and f"{passed} passed" in said, said[-6000:]
