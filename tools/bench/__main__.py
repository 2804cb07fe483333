"""Runs the benchmarks: speed, memory and FLOPs of whole training steps and of parts of the trainer.

    python -m tools.bench list                              print the subjects
    python -m tools.bench loss_head                         measure all cases of one subject; print a Markdown table
    python -m tools.bench loss_head --cases 1,0.1 --check   measure two cases, and compare the results with the bars
    python -m tools.bench attention --tiny                  small sizes: less than 20 s on one CPU core
    python -m tools.bench step --judge a.jsonl b.jsonl      compare rows that --json wrote earlier with the bars

A bar is a bound for a measured value.  Exit status: 2 if nothing could be measured; 1 if a case failed or, with --check
or --judge, a bar is missed; otherwise 0.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SUBJECTS = {
    "loss_head": "the loss and its gradients, compared with those of torch: time, memory, FLOPs",
    "attention": "attention over packed documents: every kernel, on one device and as the ranks of a cp group",
    "kernels": "every attention kernel for every kind of layer: TFLOP/s, and the error against float64",
    "delta_passes": "the passes of the gated delta rule on a rank of a cp group: time, work and launches",
    "step": "whole training steps on one GPU: tokens/s, MFU, memory, share of the roofline",
    "longest": "the longest context that fits into memory, found by running steps",
    "dynamic_cp": "a CP size for each pack, compared with a fixed size and with megatron-core's scheduler",
    "checkpoint": "time of saves and loads and stalls of training, compared with torch.save and torch.load",
    "long_questions": "the questions of sft eval --long on a CPU, compared with a plain evaluation of the same tokens",
    "optimizer": "updates of weights by each optimizer on a CPU: ratios of CPU times",
    "recompute": "whole steps with each train.recompute on a CPU: ratios of times and of counted FLOPs",
}


def parser_of(name: str, tiny: bool) -> argparse.ArgumentParser:
    """The parser of a subject's options.  With --tiny, the defaults are the small sizes."""
    module = importlib.import_module(f"tools.bench.{name}")
    subject = module.SUBJECT
    cases = subject.tiny_cases if tiny else subject.cases
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", metavar="A,B", default=",".join(cases), help="cases to measure; --list prints the default cases")
    add("--list", action="store_true", help="print the cases and stop")
    add("--tiny", action="store_true", help="small sizes: a few seconds on a CPU")
    add("--json", type=Path, metavar="FILE", help="append every row to this file as a line of JSON")
    add("--minutes", type=float, default=float("inf"), help="begin no case after this many minutes")
    if subject.bars:
        add("--check", action="store_true", help="compare the results with the bars; exit status 1 if one is missed")
        add("--judge", nargs="+", type=Path, metavar="FILE", help="measure nothing; check rows that --json wrote")
    if subject.device != "cpu":
        default = "cpu" if tiny else "auto"
        add("--device", choices=["auto", "cpu", "cuda"], default=default, help="device to measure on")
    if subject.ways:
        add("--ways", default="", metavar="A,B", help=f"names, or starts of names, of {', '.join(subject.ways)}")
    for option, declared in subject.options.items():
        declared.add_to(parser, option, tiny=tiny)
    parser.set_defaults(subject=subject)
    return parser


def ways_of(names: Sequence[str], text: str) -> list[str]:
    """The names that begin with the parts of `text`, or all names if `text` is empty.  Raises ValueError.

    fus,re -> fused, recompute in backward
    """
    chosen: list[str] = []
    for start in text.split(","):
        matches = [name for name in names if name.lower().startswith(start.strip().lower())]
        if text and len(matches) != 1:
            raise ValueError(f"--ways {start} must begin one of {', '.join(names)}; it begins {matches or 'none'}")
        chosen += matches
    return chosen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; `names` and `cases` hold the requested cases."""
    name, *others = argv
    parser = parser_of(name, "--tiny" in others)
    options = parser.parse_args(others)
    subject = options.subject
    options.names, options.ends_at = options.cases.split(","), time.monotonic() + 60 * options.minutes
    options.check, options.judge = getattr(options, "check", False), getattr(options, "judge", None)
    try:
        options.cases = [subject.read(case) for case in options.names]
        options.ways = ways_of(subject.ways, getattr(options, "ways", ""))
        subject.validate(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list or options.judge:
        return options
    wanted = getattr(options, "device", "cpu")
    if wanted != "cpu":
        set_environment()
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and (wanted == "cuda" or (wanted == "auto" and subject.device == "gpu")):
        parser.error("torch sees no CUDA device; --tiny runs the benchmark on the CPU")
    options.device = torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and has_gpu) else "cpu")
    return options


def set_environment() -> None:
    """Sets the environment variables of a run on one GPU, before this process starts CUDA."""
    from sft.parallel.layout import Layout
    from sft.run import environment
    from tools.bench.steps.case import StepCase

    config = StepCase.read("tiny:512:one").config("cuda")
    environment.prepare(config, Layout.resolve(config, 1))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["list"]:
        width = 2 + max(map(len, SUBJECTS))
        print("\n".join(f"{name:<{width}}{summary}" for name, summary in SUBJECTS.items()))
        return 0
    if not arguments or arguments[0] not in SUBJECTS:
        print(f"{__doc__}\nsubjects: {', '.join(SUBJECTS)}")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    options = parse(arguments)
    if options.list:
        print("\n".join(options.subject.describe(case) for case in options.cases))
        return 0
    from sft.errors import SftError
    from tools.bench import harness, machine

    if options.judge:
        lines = [line for path in options.judge for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [row for line in lines if "header" not in (row := json.loads(line))]
        return harness.judge(options.subject.bars(rows))
    facts = machine.header(options.device)
    print(machine.text(facts), flush=True)
    try:
        return harness.run(options.subject, options, facts)
    except (harness.Refused, SftError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
