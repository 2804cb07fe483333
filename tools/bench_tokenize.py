"""How fast chats become tokens and masks, beside what a plain script would do without proving anything.

    python tools/bench_tokenize.py --tokenizer path/to/folder        any folder with a chat template
    python tools/bench_tokenize.py --check                           the small folders of the tests; fails where ours
                                                                     takes longer than the baseline, all together

Ours is `encode_chat` for each row.  The baseline is `datasets.map` with `apply_chat_template(tokenize=True)` for each
row, which gives the same ids and no mask.  Both run in one process on the same chats, in turns; the ratio is of the
medians of their CPU times (others may use the machine), so 0.9 means that ours takes 10 % less.
"""

import argparse
import importlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

# The tokenizer's threads would make both measurements depend on who else uses the machine.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = Path(__file__).resolve().parents[1]

WORDS = """the answer is what you get if six and seven are multiplied by hand on paper: forty-two, as everyone knows.
def function(value): return value + 1  # Überprüfung 検査 in 2024, a "quoted" word; {'key': [1, 2, 3]}""".split(" ")


def random_chat(draw: random.Random, words: int) -> list[dict[str, str]]:
    """1 to 5 questions with their answers, about `words` words in all."""
    turns = draw.randint(1, 5)
    sizes = [("user", words // (4 * turns)), ("assistant", 3 * words // (4 * turns))] * turns
    return [{"role": role, "content": " ".join(draw.choices(WORDS, k=size))} for role, size in sizes]


def measure(folder: Path, num_chats: int, words: int, repeats: int) -> float:
    """Prints both rates; the ratio of our time to the baseline's."""
    import datasets
    from transformers import AutoTokenizer

    from sft.config import DataConfig
    from sft.data.chat.chat import encode_chat
    from sft.data.chat.formats import Chat
    from sft.data.chat.tokenizer import load_tokenizer

    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(DataConfig(train=["unused.jsonl"], seq_length=1, tokenizer=str(folder)))
    hf = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(0)
    chats = [random_chat(draw, words) for _ in range(num_chats)]
    rows = datasets.Dataset.from_list([{"messages": chat} for chat in chats])

    def ours() -> int:
        return sum(len(encode_chat(Chat(chat, None), tokenizer)[0]) for chat in chats)

    def baseline() -> int:
        mapped = rows.map(lambda row: {"ids": hf.apply_chat_template(row["messages"], return_dict=False)})
        return sum(map(len, mapped["ids"])) if num_tokens is None else num_tokens

    seconds: dict[str, list[float]] = {"encode_chat": [], "datasets.map": []}
    num_tokens: int | None = None
    num_tokens = baseline()
    assert ours() == num_tokens, "both must give the same tokens"
    for _ in range(repeats):
        for name, function in (("encode_chat", ours), ("datasets.map", baseline)):
            started = time.process_time()
            function()
            seconds[name].append(time.process_time() - started)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = median["encode_chat"] / median["datasets.map"]
    rates = "  ".join(f"{name} {num_chats / value:,.0f} rows/s" for name, value in median.items())
    print(f"{folder.name}: {num_chats:,} chats of {num_tokens / num_chats:,.0f} tokens  {rates}  ratio {ratio:.2f}")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, action="append", help="folder; may be given more than once")
    parser.add_argument("--chats", type=int, default=2000)
    parser.add_argument("--words", type=int, default=145, help="of a chat; about 600 tokens of the small tokenizer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail where ours is slower than the baseline")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = args.tokenizer or small_folders(Path(scratch))
        ratios = [measure(folder, args.chats, args.words, args.repeats) for folder in folders]
    mean = statistics.geometric_mean(ratios)
    print(f"all: ratio {mean:.2f}")
    return int(args.check and mean > 1.0)


def small_folders(scratch: Path) -> list[Path]:
    """The tokenizer of the tests with three of its templates."""
    sys.path.insert(0, str(ROOT))
    folder = importlib.import_module("tests.unit.fixtures.folder")
    return [
        folder.make_folder(scratch / name, folder.template(name))
        for name in ("chatml", "qwen25", "qwen3", "chatml_marked")
    ]


if __name__ == "__main__":
    sys.exit(main())
