"""Every benchmark by one command: speed, memory and arithmetic of parts of the trainer and of whole steps.

    python -m tools.bench list                              the subjects
    python -m tools.bench loss_head                         all cases of one, as a Markdown table
    python -m tools.bench loss_head --cases 1,0.1 --check   some of them; exit status 1 where a bar is missed
    python -m tools.bench attention --tiny                  toy sizes, less than 20 s on one CPU core
    python -m tools.bench step --judge a.jsonl b.jsonl      the bars, of rows that --json has written before

Exit status: 0, 1 where a case failed or --check misses a bar, 2 where nothing could be measured.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SUBJECTS = {
    "loss_head": "the loss and its gradients beside six other ways: time, memory, FLOPs",
    "logprobs": "log-probs of given logits up to 128K x 128K, as in the table of SkyRL PR #1610",
    "attention": "attention over packed documents by every kernel, alone and as the ranks of a cp group",
    "step": "whole training steps on one GPU: tokens/s, MFU, memory, share of the roofline",
    "trades": "what each key that saves memory costs in time",
    "longest": "the longest context that fits, by trying",
    "peer": "plain transformers on one document, the longest that it survives",
    "packing": "fill and time of an epoch's plan beside simpler ways to pack",
    "balance": "how level work is over ranks and microbatches beside packs in order",
    "collate": "tokens per second from mapped files to microbatches",
    "tokenize": "chats to tokens and masks beside datasets.map",
    "cp_index": "index arithmetic of context parallelism for a pack of 1M tokens",
    "metrics": "what the metrics of a step cost",
    "checkpoint": "how long a save stalls training, and how long loading takes, beside torch.save and torch.load",
    "convert": "Hugging Face to Megatron and back beside shutil.copyfile",
}


def parser_of(name: str, tiny: bool) -> argparse.ArgumentParser:
    """The options of a subject; with --tiny its tiny sizes are the defaults."""
    module = importlib.import_module(f"tools.bench.{name}")
    subject = module.SUBJECT
    cases = subject.tiny_cases if tiny else subject.cases
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", metavar="A,B", default=",".join(cases), help="which; --list names those of the default")
    add("--list", action="store_true", help="name the cases and stop")
    add("--tiny", action="store_true", help="toy sizes of a few seconds on a CPU")
    add("--json", type=Path, metavar="FILE", help="append every row to this file, a line of JSON each")
    add("--minutes", type=float, default=float("inf"), help="begin no further case after so many")
    if subject.has_bars:
        add("--check", action="store_true", help="judge what was measured; exit status 1 where a bar is missed")
        add("--judge", nargs="+", type=Path, metavar="FILE", help="measure nothing: judge rows written by --json")
    if subject.device != "cpu":
        add("--device", choices=["auto", "cpu", "cuda"], default="cpu" if tiny else "auto")
    if subject.ways:
        add("--ways", default="", metavar="A,B", help=f"some of {', '.join(subject.ways)}, by the start of their names")
    for option, declared in subject.options.items():
        declared.add_to(parser, option, tiny=tiny)
    parser.set_defaults(subject=subject)
    return parser


def ways_of(names: Sequence[str], text: str) -> list[str]:
    """All of them, or those that the text starts: `fus,re` -> fused, recompute in backward.  Raises ValueError."""
    chosen: list[str] = []
    for start in text.split(","):
        matches = [name for name in names if name.lower().startswith(start.strip().lower())]
        if text and len(matches) != 1:
            raise ValueError(f"--ways {start}: the start of {matches or 'none'} of {', '.join(names)}")
        chosen += matches
    return chosen


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """`names` and `cases` of the options are those that were asked for."""
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
    import torch

    wanted = getattr(options, "device", "cpu")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (wanted == "cuda" or (wanted == "auto" and subject.device == "gpu")):
        parser.error("torch sees no CUDA device; --tiny tries the benchmark on the CPU")
    options.device = torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and has_gpu) else "cpu")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["list"]:
        print("\n".join(f"{name:<12}{summary}" for name, summary in SUBJECTS.items()))
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
