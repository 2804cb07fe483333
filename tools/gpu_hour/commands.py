"""The commands of the steps: with their own sizes on GPUs, with toy sizes in a tiny run."""

from collections.abc import Callable, Sequence

from tools.gpu_hour.step import Command, Setting, module, torchrun

JUNIT = "junit.xml"
SESSION_S = 240  # after which no further test starts, so that the report of those that ran is written
TE = "transformer-engine"
TINY_CASE, TINY_LAYOUT = "tiny:512:chat:full", ["parallel.cp=2"]
LAYOUT = {1: [], 2: ["parallel.cp=2"], 8: ["parallel.cp=4", "parallel.pp=2"]}  # of probes, by processes
Commands = Callable[[Setting], Sequence[Command]]


def recipe(setting: Setting, *more: str) -> list[str]:
    """The demo's recipe and overrides for this machine: its data are made by the first probe."""
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
    """The layout of the probes against dp alone; on one GPU the backends, or else the precisions."""
    against = "parallel.cp=1,parallel.pp=1"
    if setting.num_processes == 1:
        has_te = TE in setting.packages and setting.device == "cuda"
        other = "bf16" if setting.device == "cpu" else "fp32"
        against = "attention.backend=portable" if has_te else f"run.precision={other}"
    return [probe("parity", setting, "--against", against)]


def bench(step: str, subject: str, *words: str, tiny: Sequence[str] = ()) -> Commands:
    """A benchmark of tools/bench with its own options, or with its tiny sizes and the options `tiny`."""

    def commands(setting: Setting) -> Sequence[Command]:
        chosen = ["--tiny", *tiny] if setting.tiny else words
        return [module("tools.bench", subject, *chosen, "--device", setting.device, "--json", setting.rows(step))]

    return commands


def curves(group: str) -> Commands:
    """A group of curves.py, on all GPUs."""

    def commands(setting: Setting) -> Sequence[Command]:
        words = ["curves", group, *(["--tiny"] if setting.tiny else [])]
        words += ["--device", setting.device, "--json", setting.rows(group)]
        return [torchrun(setting, "tools.gpu_hour.ranks", *words)]

    return commands


def speed(step: str, case: str, *overrides: str) -> Commands:
    """Steps of a case of tools/bench/steps/case.py on all GPUs, with these settings."""

    def commands(setting: Setting) -> Sequence[Command]:
        chosen, keys = (TINY_CASE, TINY_LAYOUT) if setting.tiny else (case, overrides)
        words = ["speed", chosen, *(word for key in keys for word in ("--set", key))]
        words += ["--device", setting.device, "--json", setting.rows(step)]
        return [torchrun(setting, "tools.gpu_hour.ranks", *words)]

    return commands


def gpu_tests(setting: Setting) -> Sequence[Command]:
    report = f"--junitxml={setting.folder('tests') / JUNIT}"
    chosen = ["-k", "rms_norm"] if setting.tiny else ["-n", "4"]
    words = ["-q", "-p", "no:cacheprovider", f"--session-timeout={SESSION_S}", "--durations=10", report]
    return [module("pytest", *words, "tests/gpu", *chosen)]
