"""Refuses a run whose ranks would compute attention by different kernels.  Each rank chooses on its own machine.

The results of different kernels are rounded differently, and ranks with fast kernels would wait for the others.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sft.errors import ConfigError
from sft.layers.mixers import MIXERS
from sft.layers.mixers.recurrent import RecurrentMixer
from sft.mcore.backend import AttentionBackend
from sft.mcore.backends.portable import Portable

_SUBJECTS = {"backend": "the backend of attention", "modules": "the library of modules"}
_RECURRENT = [str(kind) for kind, mixer in MIXERS.items() if issubclass(mixer, RecurrentMixer)]
_KEYS: dict[str, str] = {
    "backend": "attention.backend",
    "modules": "run.modules",
    **dict.fromkeys(_RECURRENT, "attention.delta_rule"),
}
_SHOWN = 4  # the most hosts, and the most ranks, that the message names for each kernel


def kernels_here(backend: AttentionBackend, device_type: str) -> dict[str, Any]:
    """The choice of this rank, as values to send: host, GPU, modules, kernels, and why other kernels cannot run."""
    chosen = backend.chosen if isinstance(backend, Portable) else {}
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    return {
        "host": socket.gethostname(),
        "gpu": torch.cuda.get_device_name() if on_gpu else "",
        "kernels": {
            "backend": backend.name,
            "modules": backend.library.name,
            # "fla (why)" -> "fla": hosts may have different reasons for the same kernel
            **{kind: kernel.name.partition(" (")[0] for kind, kernel in chosen.items()},
        },
        "why_not": {kind: dict(kernel.why_not) for kind, kernel in chosen.items()},
        "reason": backend.reason,
    }


def check(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if the choices of all ranks, in their order, differ."""
    for kind, first in ranks[0]["kernels"].items():
        by_name: dict[str, list[int]] = {}
        for rank, own in enumerate(ranks):
            by_name.setdefault(own["kernels"].get(kind, "none"), []).append(rank)
        if len(by_name) > 1:
            subject = _SUBJECTS.get(kind, f"the kernel of {kind}")
            parts = [f"{name} on {_where(ranks, members)}" for name, members in by_name.items()]
            raise ConfigError(
                f"All ranks must compute attention alike, but {subject} is {', and '.join(parts)}"
                f"{_reason(ranks, kind, by_name)}.  Install the same packages on every machine, use GPUs of one type, "
                f"or name a choice that all have: {_KEYS.get(kind, 'attention.kernels')}."
            )


def _where(ranks: Sequence[Mapping[str, Any]], members: Sequence[int]) -> str:
    """`ranks 0 to 7 (host a, NVIDIA H100)`"""
    hosts = list(dict.fromkeys(", ".join(filter(None, (ranks[x]["host"], ranks[x]["gpu"]))) for x in members))
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return f"{_numbers(members)} ({'; '.join(hosts[:_SHOWN])}{more})"


def _numbers(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"rank {members[0]}"
    if members[-1] - members[0] == len(members) - 1:
        return f"ranks {members[0]} to {members[-1]}"
    shown = ", ".join(map(str, members[:_SHOWN]))
    return f"ranks {shown}" + f" and {len(members) - _SHOWN} more" * (len(members) > _SHOWN)


def _reason(ranks: Sequence[Mapping[str, Any]], kind: str, by_name: Mapping[str, Sequence[int]]) -> str:
    """A text that says why some ranks do not use the kernel of other ranks; empty if no rank knows the reason."""
    for members in by_name.values():
        own = ranks[members[0]]
        if kind == "backend":
            if own["kernels"]["backend"] == "portable":
                return f": there, portable ({own['reason']})"
            continue
        reasons = own["why_not"].get(kind, {})
        for name in by_name:
            if name in reasons:
                return f".  On {_numbers(members)}, {name} does not run: {reasons[name]}"
    return ""
