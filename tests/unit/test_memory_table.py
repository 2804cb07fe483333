"""tools/memory_table.py: docs/performance.md has what the equations say."""

from tools import memory_table


def test_the_page_is_up_to_date() -> None:
    """If not: python -m tools.memory_table --write"""
    text = memory_table.PAGE.read_text(encoding="utf-8")
    assert memory_table.page(text) == text


def test_what_the_tables_say() -> None:
    """Qwen3-1.7B: 18 bytes of 1,720,574,976 parameters, on 8 ranks 7.5; 4 x 2048 + 2 x 6144 + 64 + 4 + 96 bytes, or
    20.2 KiB."""
    printed = memory_table.tables()
    assert "| Qwen3-1.7B | 31 GB | 13 GB | 70.2 KiB | 20.2 KiB | 4.0 KiB |" in printed
    assert "| Llama-8B | 145 GB | 60 GB | 136.1 KiB | 36.1 KiB | 8.0 KiB |" in printed
    assert printed.count("\n| Llama-8B, ") == printed.count("\n| Qwen3-4B, ") == 2 * len(memory_table.WAYS)
