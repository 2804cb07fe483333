"""Declares the steps of the first hour on a GPU machine, in order, with their commands and limits.

A tiny run uses toy sizes.  bars.py declares the bars of the steps, and docs/numbers/gpu-hour.md describes the steps.
"""

from collections.abc import Sequence
from typing import Any

from tools.gpu_hour import curves as group_curves
from tools.gpu_hour.step import Command, Setting, Step, module, torchrun

JUNIT = "junit.xml"
SESSION_S = 240  # seconds after which no further test starts, so that pytest writes its report before the limit
TE = "transformer-engine"
TINY_CASE, TINY_LAYOUT = "tiny:512:chat:full", ["parallel.cp=2"]
LAYOUT = {1: [], 2: ["parallel.cp=2"], 8: ["parallel.cp=4", "parallel.pp=2"]}  # of the probes, by number of processes


def recipe(setting: Setting, *more: str) -> list[str]:
    """The demo's recipe with overrides for this machine.  The first probe makes the data of the demo."""
    folder = setting.folder("probe-data")
    sizes = ["model.num_layers=4", "train.global_batch_size=8"]
    if setting.tiny:
        sizes = ["data.seq_length=6144", "train.global_batch_size=2"]
    precision = "bf16" if setting.device == "cuda" else "fp32"
    return [
        "recipes/demo.yaml", f"run.device={setting.device}", f"run.precision={precision}", "model.head_dim=64",
        f"data.train={folder}/train.jsonl", f"data.eval={folder}/heldout.jsonl", f"data.cache_dir={folder}/cache",
        f"run.dir={folder}/run", "parallel.cp=1", *sizes, *more,
    ]  # fmt: skip


def probe(name: str, setting: Setting, *more: str) -> Command:
    words = [*recipe(setting, *LAYOUT[setting.num_processes]), *more]
    return torchrun(setting, "sft", "probe", name, *words, "--json", setting.rows(f"probe-{name}"))


def probe_data(setting: Setting) -> Sequence[Command]:
    sizes = ["--samples", "40", "--max-tokens", "6000"] if setting.tiny else []
    return [
        module("tools.make_demo_corpus", "--out", str(setting.folder("probe-data")), *sizes),
        module("sft", "data", "prepare", *recipe(setting)),
        probe("data", setting),
    ]


def probe_parity(setting: Setting) -> Sequence[Command]:
    """Compares the layout of the probes with dp alone.  One GPU compares two backends, or else two precisions."""
    against = "parallel.cp=1,parallel.pp=1"
    if setting.num_processes == 1:
        has_te = TE in setting.packages and setting.device == "cuda"
        other = "bf16" if setting.device == "cpu" else "fp32"
        against = "attention.backend=portable" if has_te else f"run.precision={other}"
    return [probe("parity", setting, "--against", against)]


def bench(name: str, question: str, command: str, *, limit_s: int, tiny: str = "") -> Step:
    """A step that runs a benchmark of tools/bench.

    command  the benchmark and its options
    tiny     the options in a tiny run, which also gets --tiny
    """
    subject, *words = command.split()

    def commands(setting: Setting) -> Sequence[Command]:
        chosen = ["--tiny", *tiny.split()] if setting.tiny else words
        return [module("tools.bench", subject, *chosen, "--device", setting.device, "--json", setting.rows(name))]

    return Step(name=name, question=question, commands=commands, limit_s=limit_s)


def curves(name: str, question: str, **more: Any) -> Step:
    """A step that measures a group of curves.py on all GPUs."""

    def commands(setting: Setting) -> Sequence[Command]:
        words = ["curves", name, *(["--tiny"] if setting.tiny else [])]
        words += ["--device", setting.device, "--json", setting.rows(name)]
        return [torchrun(setting, "tools.gpu_hour.ranks", *words)]

    return Step(name=name, question=question, commands=commands, **more)


def speed(name: str, subject: str, case: str, settings: str, **needs: Any) -> Step:
    """A step that measures training steps of a case of tools/bench/steps/case.py on all GPUs, with these settings."""

    def commands(setting: Setting) -> Sequence[Command]:
        chosen, keys = (TINY_CASE, TINY_LAYOUT) if setting.tiny else (case, settings.split())
        words = ["speed", chosen, *(word for key in keys for word in ("--set", key))]
        words += ["--device", setting.device, "--json", setting.rows(name)]
        return [torchrun(setting, "tools.gpu_hour.ranks", *words)]

    question = f"speed and memory of {subject}"
    return Step(name=name, question=question, commands=commands, limit_s=240, gpus=8, **needs)


def adapters(setting: Setting) -> Sequence[Command]:
    case = "tiny:64:one:none+lora4" if setting.tiny else "8b:16k:one:none+lora16"
    words = ["adapters", case, "--device", setting.device, "--json", setting.rows("adapters")]
    return [torchrun(setting, "tools.gpu_hour.ranks", *words, num_processes=1)]


def gpu_tests(setting: Setting) -> Sequence[Command]:
    report = f"--junitxml={setting.folder('tests') / JUNIT}"
    chosen = ["-k", "rms_norm"] if setting.tiny else ["-n", "4"]
    words = ["-q", "-p", "no:cacheprovider", f"--session-timeout={SESSION_S}", "--durations=10", report]
    return [module("pytest", *words, "tests/gpu", *chosen)]


MACHINE = Step(
    name="machine",
    question="which hardware, which versions",
    commands=lambda setting: [module("tools.gpu_hour.machine", "--json", setting.rows("machine"))],
    limit_s=60,
)
STEPS: Sequence[Step] = (
    Step(
        name="probe-data",
        question="do all ranks read the documents, masks and positions that they should",
        commands=probe_data,
        limit_s=90,
    ),
    Step(
        name="probe-leak",
        question="does a document change another one of its pack",
        commands=lambda setting: [probe("leak", setting)],
        limit_s=120,
    ),
    Step(
        name="probe-parity",
        question="do two layouts or backends compute the same losses and gradients",
        commands=probe_parity,
        limit_s=120,
    ),
    Step(name="tests", question="do the tests of GPUs pass", commands=gpu_tests, limit_s=270, cuda=True),
    curves("layouts", "do layouts, recompute and bf16 give one curve", limit_s=150),
    curves(
        "kinds",
        "do models of every kind of attention give the curve of full precision",
        limit_s=group_curves.limit_s("kinds"),
    ),
    curves(
        "recurrences",
        "do linear attention and Mamba-2 give the curve of full precision",
        limit_s=group_curves.limit_s("recurrences"),
    ),
    curves(
        "more-kinds",
        "do experts, adapters and FP8 give the curve of full precision",
        limit_s=group_curves.limit_s("more-kinds"),
    ),
    curves(
        "backends",
        "does Transformer Engine give the curve of portable, with every cp_comm",
        limit_s=150,
        packages=(TE,),
        cuda=True,
    ),
    curves("deterministic", "is a run with run.deterministic bitwise repeatable", limit_s=90),
    bench(
        "memory",
        "is the allocator's peak that of the estimate",
        "step --steps 1 --kernels flash --minutes 0.8 "
        "--cases 1.7b:64k:one:selective,1.7b:32k:chat:selective,1.7b:84k:longmix:selective",
        limit_s=150,
    ),
    bench(
        "loss-head",
        "time and memory of the loss head at 262,144 tokens",
        "loss_head --cases 1 --dtype bf16 --tokens 262144 --hidden 2048 --vocab 62080 --chunks 4096 --ways fused",
        limit_s=120,
    ),
    bench(
        "kernels",
        "rates and errors of every attention kernel, for every kind of layer",
        "kernels --minutes 2",
        limit_s=240,
    ),
    bench(
        "delta-passes",
        "time and launches of the passes of linear attention, and their work under cp",
        "delta_passes --minutes 0.5",
        limit_s=60 + group_curves.FLA_S,
    ),
    Step(
        name="adapters",
        question="time of linear layers with adapters, beside the same without",
        commands=adapters,
        limit_s=60,
    ),
    bench(
        "attention",
        "time of each attention kernel, and of the ranks of cp 8",
        "attention --cases 64k:one,64k:chat,128k:one --cp 1,8 --minutes 0.8",
        limit_s=150,
    ),
    bench(
        "steps",
        "tokens per second, MFU and share of the roofline of whole training steps",
        "step --minutes 4 --cases 1.7b:64k:one:selective,1.7b:128k:one:selective+offload,1.7b:32k:chat,1.7b:32k:padded,"
        "4b:64k:one:selective+offload",
        limit_s=360,
    ),
    bench(
        "recompute",
        "time of a step that recomputes all but attention, beside one that recomputes attention, too",
        "step --minutes 1 --cases 1.7b:64k:one:full,1.7b:64k:one:attention_kept",
        limit_s=180,
        tiny="--cases tiny:512:one:attention_kept",
    ),
    bench(
        "offload",
        "time of a step with activations, and with half of the optimizer, in host memory",
        "step --minutes 0.8 --cases 1.7b:64k:one:selective+offload,1.7b:64k:one:full+optim0.5",
        limit_s=150,
        tiny="--cases tiny:512:one:selective+offload",
    ),
    bench(
        "longest",
        "is the longest context that fits the one of the estimate",
        "longest --minutes 2 --cases 1.7b",
        limit_s=240,
    ),
    bench(
        "checkpoint",
        "how long a save stalls training, and how long a load takes",
        "checkpoint --ranks 1 --mib 4096 --repeats 2",
        limit_s=180,
        tiny="--ranks 1",
    ),
    speed("speed-dp8", "Qwen3-1.7B on chats, dp 8", "1.7b:32k:chat:selective", "train.global_batch_size=16"),
    speed(
        "speed-tp2-cp4",
        "Qwen3-8B at 64K, tp 2 x cp 4",
        "8b:64k:one:selective",
        "parallel.tp=2 parallel.cp=4",
    ),
    speed("speed-cp8", "Qwen3-8B at 64K, cp 8", "8b:64k:one:selective+offload", "parallel.cp=8"),
    speed(
        "speed-cp8-a2a-p2p",
        "Qwen3-8B at 64K, cp 8 in two levels",
        "8b:64k:one:selective+offload",
        "parallel.cp=8 parallel.cp_comm=a2a+p2p parallel.cp_a2a=2 attention.backend=te",
        packages=(TE,),
        cuda=True,
    ),
)
