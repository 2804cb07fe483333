"""The tables that bench_step prints: a row of a case, what each way of saving memory costs, the longest context."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools import measure

WIDTHS = (42, 6, 9, 10, 9, 8, 8, 8, 8, 9, 9)
HEAD = ("", "steps", "s/step", "tokens/s", "TFLOP/s", "MFU", "GiB", "by eq.", "host", "of keep", "of full")
OF_TRADES = (42, 9, 9, 9, 9)


def gib(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / 2**30:.1f}"


def lines(row: Mapping[str, Any]) -> list[str]:
    """Of one row: the numbers, the constants of that process, where the time went."""
    if row["status"] != "done":
        return [f"{row['case']:<{WIDTHS[0]}}  {row['status']}"]
    percent = {name: f"{row[name]:.1%}" if name in row else "-" for name in ("mfu", "of_keep", "of_full")}
    cells = [
        row["case"], row["steps"], f"{row['seconds'] / row['steps']:.3f}", f"{row['tokens_per_s']:,.0f}",
        f"{row['tflops']:.1f}", percent["mfu"], gib(row["peak_bytes"]), gib(row.get("by_equations")),
        gib(row.get("host_bytes")), percent["of_keep"], percent["of_full"],
    ]  # fmt: skip
    constants = row["constants"]
    rates = [f"{n} {r['forward'] / 1e12:.0f} / {r['backward'] / 1e12:.0f}" for n, r in constants["attention"].items()]
    told = [f"product {constants['gemm'] / 1e12:.0f} TFLOP/s", f"attention {', '.join(rates)}"]
    told += [f"{n} {constants[n] / 1e9:,.0f} GB/s" for n in ("copy", "to device", "to host") if n in constants]
    absent = constants["attention not run"]
    told += [f"no {name} ({why})" for name, why in absent.items()]
    where = [f"{name} {share:.1%}" for name, share in row["shares"].items()]
    found = [measure.columns(cells, WIDTHS), f"    {row['backend']}", f"    {'; '.join(told)}"]
    return found + ([f"    {', '.join(where)}"] if where else [])


def traded(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each way costs and saves, in terms of the first that was measured."""
    done = [row for row in rows if row["status"] == "done"]
    if not done:
        return ["trades: none of these was measured"]
    first = done[0]
    found = [measure.columns((f"times {first['case']}", "time", "GiB", "by eq.", "host"), OF_TRADES)]
    for row in done:
        ratio = row["seconds"] / row["steps"] / (first["seconds"] / first["steps"])
        cells = [f"{ratio:.3f}", gib(row["peak_bytes"]), gib(row["by_equations"]), gib(row["host_bytes"])]
        found.append(measure.columns([row["case"], *cells], OF_TRADES))
    return found


def of_search(row: Mapping[str, Any]) -> str:
    """The longest context of one shape."""
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
    fails = "nothing failed" if row["fails"] is None else f"{row['fails']:,} does not fit"
    told = f"{row['longest']} with {row['memory']}: {row['fits']:,} tokens fit, {fails}; "
    told += f"by the equations {row['predicted']:,}; found / predicted {ratio}"
    return told if row["status"] == "done" else f"{told}; {row['status']}"
