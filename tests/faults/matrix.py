"""The faults that a run must survive, by the ids of the project's fault matrix, and the tests that prove it.

A row is proved by tests in this folder that count their faults (`hit`), or by tests elsewhere; otherwise the row gives
the reason why it is not proved.  `test_matrix.py` compares this table with the tests.
"""

from collections import Counter
from dataclasses import dataclass, field

HERE = "here"


@dataclass(frozen=True)
class Row:
    fault: str
    proofs: tuple[str, ...] = ()  # HERE, or tests elsewhere as file::name
    missing: str = ""  # why the row is not proved, or not completely


ROWS = {
    "P1": Row("kill -9 one rank between steps", (HERE,)),
    "P2": Row("kill -9 all ranks at any instant", (HERE,)),
    "P3": Row("exception in one rank", (HERE,)),
    "P4": Row("_exit(0) of one rank", (HERE,)),
    "P5": Row("MemoryError in a step", (HERE,)),
    "P6": Row("kill -9 of the torchrun agent", (HERE,)),
    "P7": Row("three starts without progress", (HERE,)),
    "S1": Row("kill -9 at 13 points of a save, or at random during it", (HERE,)),
    "S2": Row("disk full", (HERE,)),
    "S3": Row("folder is read-only", (HERE,)),
    "S4": Row("the writer of a background save fails", (HERE,), "no writer process any more: it is a thread"),
    "S5": Row("signal during a background save", (HERE,)),
    "S6": Row("same step saved twice", (HERE,)),
    "S7": Row("retention", (HERE,)),
    "S8": Row("an old checkpoint cannot be deleted", (HERE,)),
    "S9": Row("a save takes longer than run.grace_s", (HERE,)),
    "S10": Row("pointer empty, garbage, a path, negative, removed", (HERE,)),
    "S11": Row(
        "a weight is not finite at a save",
        ("tests/ranks/test_save_failures.py::test_whatever_fails_all_ranks_hear_it_and_nothing_is_left",),
    ),
    "L1": Row("a file cut by a byte, emptied, removed", (HERE,)),
    "L2": Row("one bit flipped in each kind of file", (HERE,)),
    "L3": Row("manifest removed, cut, with wrong digests; extra files", (HERE,)),
    "L4": Row(
        "all checkpoints are damaged",
        ("tests/ranks/test_resume_refusals.py::test_where_all_are_damaged_no_start_begins_anew",),
    ),
    "L5": Row(
        "resume: must without one; path with a typo", ("tests/ranks/test_check_and_train.py::test_the_same_refusal",)
    ),
    "L6": Row("ranks see different listings", (HERE,)),
    "L7": Row("checkpoint of another model", ("tests/ranks/test_check_and_train.py::test_the_same_refusal",)),
    "L8": Row("moments are missing", (HERE,)),
    "L9": Row(
        "checkpoint of Megatron-LM, without manifest",
        ("tests/ranks/test_interop.py::test_what_megatron_saves_we_load",),
    ),
    "L10": Row("second job in the folder", (HERE,)),
    "X1": Row("hostile .metadata, common.pt, byte object", ("tests/unit/mcore/checkpoint_io/test_safe_reader.py",)),
    "X2": Row("manifest or pointer with .., absolute path, link", (HERE,)),
    "X3": Row(
        "YAML with a tag, duplicate or unknown key, alias bomb",
        (
            "tests/unit/recipe/test_recipe_mistakes.py::test_a_key_given_twice",
            "tests/unit/recipe/test_recipe.py",
            "tests/unit/data/chat/test_escaping.py",
        ),
    ),
    "X4": Row(
        "chat template that attacks",
        (
            "tests/unit/data/template/test_sandbox.py::test_no_way_out",
            "tests/unit/data/template/test_sandbox.py::test_endless",
            "tests/unit/data/template/test_sandbox.py::test_too_much_text",
        ),
    ),
    "T1": Row("same layout", (HERE, "tests/ranks/test_resume.py::test_resuming_on_the_same_layout_is_bitwise")),
    "T2": Row("dp 2 <-> 1", ("tests/ranks/test_resume_layouts.py::test_another_layout_continues_the_curve",)),
    "T3": Row("tp, pp 2 <-> 1", ("tests/ranks/test_resume_layouts.py::test_another_layout_continues_the_curve",)),
    "T4": Row("cp 2 <-> 1", ("tests/ranks/test_resume_layouts.py::test_another_layout_continues_the_curve",)),
    "T5": Row("tp x cp swapped", ("tests/ranks/test_resume_layouts.py::test_another_layout_continues_the_curve",)),
    "T6": Row("several resumes, each on another layout", (HERE,)),
    "T7": Row("batch, length, seed, data changed", ("tests/ranks/test_check_and_train.py::test_the_same_refusal",)),
    "T8": Row("resume at, before and after an epoch's end", (HERE,)),
    "T9": Row("optimizer kept by rank (dp_reshardable)", (HERE,)),
    "T10": Row(
        "random generators, as dropout would use them",
        ("tests/ranks/test_resume.py::test_generators_go_on_where_they_were_on_the_same_layout_only",),
        "the recipe has no dropout",
    ),
    "R1": Row("the node is lost: an object store has the checkpoints", (HERE,)),
    "R2": Row("an object store is slow, refuses requests and cuts answers", (HERE,)),
    "R3": Row("kill -9 at 50 requests to an object store", (HERE,)),
    "R4": Row("second job at one place in an object store", (HERE,)),
    "R5": Row("a checkpoint is damaged here, and whole in the store", (HERE,)),
    "R6": Row("an object store allows no writes for a while", (HERE,)),
    "D1": Row(
        "broken rows and files",
        (
            "tests/unit/data/rows/test_rows.py::test_bad_files",
            "tests/unit/data/read/test_bad_rows.py::test_a_bad_row_is_named_and_alone",
        ),
    ),
    "D2": Row(
        "chats that make no sense", ("tests/unit/data/rows/test_rows.py", "tests/unit/data/chat/test_encode_chat.py")
    ),
    "D3": Row(
        "over-long samples",
        (
            "tests/unit/data/cache/test_corpus.py::test_over_long_is_an_error_by_default",
            "tests/unit/data/cache/test_corpus.py::test_over_long_dropped",
        ),
    ),
    "D4": Row(
        "nothing supervised on a rank, in a batch",
        ("tests/ranks/test_counting.py::test_unsupervised_microbatches_change_nothing",),
    ),
    "D5": Row("data edited between starts", ("tests/ranks/test_check_and_train.py::test_the_same_refusal",)),
    "D6": Row(
        "a process that tokenises dies", ("tests/unit/data/cache/test_prepare.py::test_a_process_that_is_killed",)
    ),
    "D7": Row(
        "cache damaged, or of other settings",
        ("tests/unit/data/cache/test_prepare.py::test_a_damaged_store_is_made_again",),
    ),
    "D8": Row(
        "control tokens in what a user wrote",
        ("tests/unit/data/chat/test_encode_chat.py::test_typed_control_strings_stay_text",),
    ),
    "N1": Row("loss of one rank is NaN", (HERE,)),
    "N2": Row("gradient of one rank is infinite", (HERE,)),
    "N3": Row("loss spike", ("tests/unit/run/test_step_check.py",)),
    "N4": Row("a bit of a replica's weight flips in memory", (), "not built: no periodic digest across replicas"),
    "G1": Row("SIGTERM, USR1, INT, HUP, QUIT to launcher or a rank", (HERE,)),
    "G2": Row("two signals", (HERE,)),
    "G3": Row("signal during load, evaluation, save, start", (HERE,)),
    "G4": Row("run.exit_after_minutes, end of the SLURM job", (HERE,)),
    "H1": Row("a rank sleeps or is stopped", (HERE,)),
    "H2": Row("a rank leaves out a collective", (HERE,)),
    "O1": Row("TensorBoard after a crash", (HERE,)),
    "O2": Row("log cannot be written", (HERE,)),
    "O3": Row("the clock is set back", (HERE,)),
    "O4": Row("two starts in the same second", (HERE,)),
    "O5": Row("stdout closed", (HERE,)),
}


@dataclass
class Matrix:
    """The faults of this pytest session, by row."""

    struck: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def table(self, *, whole: bool) -> list[str]:
        """One line for each row; if only some of the tests ran, only rows whose faults struck."""
        lines = [f"{'row':4} {'fault':55} {'times':>5} {'survived':>8}  proved by"]
        for name, row in ROWS.items():
            times = self.struck[name]
            if not whole and not times:
                continue
            told = [f"FAILED: {', '.join(self.failed[name])}"] if name in self.failed else []
            told += ["not run"] if HERE in row.proofs and not times and not told else []
            told += [proof for proof in (*row.proofs, row.missing) if proof not in (HERE, "")]
            numbers = f"{times:5} {self.survived[name]:8}" if HERE in row.proofs else f"{'':5} {'':8}"
            lines.append(f"{name:4} {row.fault:55} {numbers}  {'; '.join(told)}".rstrip())
        return lines + self.notes
