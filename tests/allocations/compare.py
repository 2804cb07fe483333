"""Compares counted bytes with sft/estimate/memory.py, in total and by category."""

from dataclasses import dataclass
from typing import Any

from sft.estimate.memory import Memory
from tests.allocations.categories import GRADIENTS, OPTIMIZER, ROTARY, SAVED, WEIGHTS, WORKING, Peak

# Bars of the prediction: allowed differences, as shares of the predicted bytes.
TOTAL, CATEGORY = 0.05, 0.08
# A category may miss its bar if the difference is below this share of the total: rotary tables and other small tensors.
SMALL = 0.01
_ITEMS = {
    "weights": WEIGHTS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
    "saved by layers": SAVED,
    "rotary": ROTARY,
}


@dataclass(frozen=True)
class Comparison:
    """counted: bytes of each category at the peak; predicted: predicted bytes of each category; items: predicted
    working set by name"""

    row: str
    ranks: int
    counted: Peak
    predicted: dict[str, float]
    items: list[str]

    @staticmethod
    def of(row: str, ranks: int, counted: Peak, expected: Memory) -> "Comparison":
        predicted = dict.fromkeys((*_ITEMS.values(), WORKING), 0.0)
        for item, size in expected.items().items():
            predicted[_ITEMS.get(item, WORKING)] += size
        return Comparison(row, ranks, counted, predicted, [item for item in expected.items() if item not in _ITEMS])

    @property
    def ratio(self) -> float:
        return self.counted.total / sum(self.predicted.values())

    @property
    def misses(self) -> list[str]:
        """`working: counted 3.0, predicted 2.0`, in MiB; empty if the row is within the bars."""
        total = sum(self.predicted.values())
        pairs = {name: (self.counted.by_category.get(name, 0), size) for name, size in self.predicted.items()}
        bars = {name: max(CATEGORY * size, SMALL * total) for name, (_, size) in pairs.items()}
        pairs["total"], bars["total"] = (self.counted.total, total), TOTAL * total
        return [
            f"{name}: counted {found / 2**20:.1f}, predicted {size / 2**20:.1f}"
            for name, (found, size) in pairs.items()
            if abs(found - size) > bars[name]
        ]

    def as_json(self, unit: int) -> dict[str, Any]:
        """unit: bytes of one unit of the numbers.  The value of each category is [counted, predicted]."""
        names = sorted({*self.predicted, *self.counted.by_category})
        found = self.counted.by_category
        return {
            "row": self.row,
            "ranks": self.ranks,
            "ratio": round(self.ratio, 4),
            "total": [round(self.counted.total / unit, 2), round(sum(self.predicted.values()) / unit, 2)],
            **{
                name: [round(found.get(name, 0) / unit, 3), round(self.predicted.get(name, 0.0) / unit, 3)]
                for name in names
            },
            "peak": [self.counted.where, " + ".join(self.items)],
            "misses": self.misses,
            "largest": [f"{size / unit:.3f} {what}" for size, what in self.counted.largest],
        }
