"""How long the context-parallel index arithmetic of one microbatch takes (sft/parallel/context_parallel.py).

    python tools/bench_cp.py            print the table and a summary line
    python tools/bench_cp.py --check    and exit 1 when 1,000 documents take longer than BAR_MS

One row is one pack.  `indices` is local_indices of the most expensive rank, `inverse` is gathered_positions;
the sum is what a rank pays per microbatch.  Medians over REPEATS calls on one core.
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from sft.parallel import context_parallel

REPEATS = 31
BAR_MS = 10.0  # indices and inverse of 1M tokens in 1,000 documents
MILLION = 1 << 20
CASES = [  # documents, cp
    (1000, 1),
    (1000, 2),
    (1000, 8),
    (1000, 32),
    (1, 8),
    (MILLION // 16, 8),  # as short as they come
]


def documents(num_documents: int, cp_size: int) -> np.ndarray:
    """cu_seqlens of 1M tokens in documents of unequal length, each a multiple of 2 * cp_size."""
    multiple = 2 * cp_size
    total = MILLION // multiple
    inner = np.random.default_rng(0).choice(np.arange(1, total), size=num_documents - 1, replace=False)
    return np.concatenate([[0], np.sort(inner), [total]]).astype(np.int32) * np.int32(multiple)


def median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {BAR_MS:g} ms")
    arguments = parser.parse_args()

    print(f"{'tokens':>10}{'documents':>11}{'cp':>4}{'indices ms':>12}{'inverse ms':>12}{'sum ms':>9}")
    slowest = 0.0
    for num_documents, cp_size in CASES:
        cu_seqlens = documents(num_documents, cp_size)
        indices = max(
            median_ms(lambda: context_parallel.local_indices(cu_seqlens, cp_size, r)) for r in (0, cp_size - 1)
        )
        inverse = median_ms(lambda: context_parallel.gathered_positions(cu_seqlens, cp_size))
        total = indices + inverse
        print(f"{MILLION:>10,}{num_documents:>11,}{cp_size:>4}{indices:>12.2f}{inverse:>12.2f}{total:>9.2f}")
        slowest = max(slowest, total if num_documents == 1000 else 0.0)

    met = slowest <= BAR_MS
    print(
        f"bench_cp: 1M tokens in 1,000 documents, slowest cp: {slowest:.2f} ms "
        f"(bar {BAR_MS:g} ms, {'met' if met else 'MISSED'})"
    )
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
