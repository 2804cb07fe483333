"""Adam with moments in bf16 and int8: codes by literals, the mean of rounding, and ten steps against a float64 loop."""

from typing import Literal

import numpy as np
import pytest
import torch

from sft.errors import ConfigError
from sft.mcore.optimizer import low_bit_adam, rounding
from sft.mcore.optimizer.low_bit_adam import LowBitAdamW

Kind = Literal["bf16", "int8"]
CPU = torch.device("cpu")
# --- the float64 loop --------------------------------------------------------------------------------------------


def hashed(bits: np.ndarray) -> np.ndarray:
    """lowbias32 on uint32."""
    bits = bits.astype(np.uint64)
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
    bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
    return bits ^ bits >> 16


def noise(step: int, start: int, number: int) -> np.ndarray:
    """Two random shares in [0, 1) of each element: [2, number]."""
    seed = hashed(np.array([step * 0x9E3779B9 % 2**32]))
    bits = hashed((np.arange(start, start + number).astype(np.uint64) ^ seed))
    return np.stack([bits % 2**16, bits >> 16]) / 2.0**16


def rounded(values: np.ndarray, neighbours: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Each value becomes the lower or, with probability of its distance from it, the upper neighbour in the list."""
    above = np.searchsorted(neighbours, values, side="right").clip(1, len(neighbours) - 1)
    low, high = neighbours[above - 1], neighbours[above]
    return np.where((values - low) / (high - low) > share, high, low)


def bf16(values: np.ndarray, share: np.ndarray) -> np.ndarray:
    gap = 2.0 ** (np.floor(np.log2(np.abs(values) + 1e-300)) - 7)
    low = np.trunc(values / gap) * gap  # the neighbour nearer to 0
    return np.where(np.abs(values - low) / gap + share >= 1.0, low + np.sign(values) * gap, low)


def int8(values: np.ndarray, share: np.ndarray, *, is_signed: bool) -> np.ndarray:
    decades = [
        np.linspace(0.1, 1.0, 2 ** (i + (not is_signed)) + 1).repeat(2)[1:-1].reshape(-1, 2).mean(1) * 10.0 ** (i - 6)
        for i in range(7)
    ]
    positive = np.concatenate([*decades, [1.0]])
    codes = np.concatenate([-positive[::-1], [0.0], positive]) if is_signed else np.concatenate([[0.0], positive])
    if is_signed:
        codes = np.delete(codes, 1)  # -0.993
    assert len(codes) == 256
    out = np.zeros_like(values)
    for begin in range(0, len(values), 64):
        block = slice(begin, begin + 64)
        scale = np.abs(values[block]).max()
        if scale:
            out[block] = rounded(values[block] / scale, codes, share[block]) * scale
            if not is_signed:
                out[block] = np.where(values[block] > 0, np.maximum(out[block], codes[1] * scale), 0.0)
    return out


def reference(kind: Kind, weight: np.ndarray, grads: list[np.ndarray], start: int, **keys: float) -> np.ndarray:
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step, grad in enumerate(grads, 1):
        first = keys["beta1"] * first + (1 - keys["beta1"]) * grad
        second = keys["beta2"] * second + (1 - keys["beta2"]) * grad**2
        corrected = np.sqrt(second / (1 - keys["beta2"] ** step)) + keys["eps"]
        weight = weight * (1 - keys["lr"] * keys["decay"])
        weight = weight - keys["lr"] * first / (1 - keys["beta1"] ** step) / corrected
        shares = noise(step, start, len(weight))
        if kind == "bf16":
            first, second = (bf16(moment, share) for moment, share in zip((first, second), shares))
        else:
            first = int8(first, shares[0], is_signed=True)
            second = int8(second, shares[1], is_signed=False)
    return weight


# A share that fp32 rounding moves over the random number makes one moment differ by one code, which changes one weight
# of an update by up to 10 % of the learning rate.  All others agree to fp32 rounding.
FP32_TOLERANCE, MOST_ELSEWHERE = 2e-6, 2e-3


def optimizer_of(kind: Kind, weight: torch.Tensor, start: int = 0, **keys: float) -> LowBitAdamW:
    group = {
        "params": [weight],
        "lr": keys["lr"],
        "betas": (keys["beta1"], keys["beta2"]),
        "eps": keys["eps"],
        "weight_decay": keys["decay"],
    }
    return LowBitAdamW([group], kind, {weight: start})


KEYS = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1)


def drawn(number: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A weight and ten gradients whose magnitudes differ by up to 1e4 within a block."""
    draw = np.random.default_rng(5)
    sizes = 10.0 ** draw.uniform(-6, -2, number)
    return draw.normal(size=number), [sizes * draw.normal(size=number) for _ in range(10)]


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("start, number", [(0, 1000), (128, 64 * 700 + 5)], ids=["a parameter", "a slice in pieces"])
def test_ten_steps(kind: Kind, start: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(low_bit_adam._PIECE, "cpu", 1 << 14)
    weight, grads = drawn(number)
    grads = [grad.astype(np.float32).astype(np.float64) for grad in grads]
    weight = weight.astype(np.float32).astype(np.float64)
    param = torch.tensor(weight, dtype=torch.float32)
    optimizer = optimizer_of(kind, param, start, **KEYS)
    for grad in grads:
        param.grad = torch.tensor(grad, dtype=torch.float32)
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 10
    difference = np.abs(param.double().numpy() - reference(kind, weight, grads, start, **KEYS))
    assert (difference > FP32_TOLERANCE).mean() < MOST_ELSEWHERE, (difference > FP32_TOLERANCE).mean()
    assert difference.max() < 10 * KEYS["lr"]
    # Without rounding, weights differ: the test sees the moments.
    adam = torch.tensor(weight, dtype=torch.float32)
    exact = torch.optim.AdamW([adam], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for grad in grads:
        adam.grad = torch.tensor(grad, dtype=torch.float32)
        exact.step()
    assert (np.abs(adam.numpy() - param.numpy()) > FP32_TOLERANCE).mean() > 0.5


# --- rounding ----------------------------------------------------------------------------------------------------


def test_the_maps() -> None:
    signed, unsigned = (rounding.dynamic_map(is_signed=is_signed).tolist() for is_signed in (True, False))
    assert len(signed) == len(unsigned) == 256 and sorted(set(signed)) == signed and sorted(set(unsigned)) == unsigned
    assert signed[:2] == pytest.approx([-1.0, -0.97890625]) and signed[-2:] == pytest.approx([0.99296875, 1.0])
    assert signed[126:129] == pytest.approx([-5.5e-7, 0.0, 5.5e-7])
    assert unsigned[:4] == pytest.approx([0.0, 3.25e-7, 7.75e-7, 2.125e-6]) and unsigned[-1] == 1.0


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_the_mean_is_kept(kind: Kind) -> None:
    """The mean over 4,096 steps is that of the values; rounding to the nearest would move it by up to half a gap."""
    values = torch.full((64,), 0.3333)
    values[0] = 1.0
    table, total = rounding.dynamic_map(is_signed=False), torch.zeros(64, dtype=torch.float64)
    for step in range(4096):
        bits = rounding.random_bits(step, 0, 64, CPU) & 0xFFFF
        codes = rounding.to_int8(values, table, bits) if kind == "int8" else None
        total += rounding.to_bf16(values, bits).double() if codes is None else rounding.from_int8(*codes, table)
    gap = 2.0**-9 if kind == "bf16" else 0.9 / 128
    # The mean of 4,096 results that are gap apart has a deviation of at most gap / 128.
    assert (total / 4096 - values).abs().max() < 5 * gap / 128
    nearest = (
        values.bfloat16().float()
        if kind == "bf16"
        else rounding.from_int8(*rounding.to_int8(values, table, None), table)
    )
    assert (nearest - values).abs().max() > gap / 16


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_stored_block_is_read_exactly(is_signed: bool) -> None:
    """A checkpoint holds the values; quantising them gives the codes and scales that were saved."""
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(1003, generator=draw) * torch.logspace(-25, 3, 1003)
    values = values if is_signed else values.abs()
    values[64:128], values[130] = 0.0, 1e-35
    table = rounding.dynamic_map(is_signed=is_signed)
    codes, scales = rounding.to_int8(values, table, rounding.random_bits(9, 0, 1003, CPU) & 0xFFFF)
    again = rounding.to_int8(rounding.from_int8(codes, scales, table), table, None)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    assert len(scales) == 16 and scales[1] == 0.0 and len(set(codes.tolist())) > 150


def test_a_small_second_moment_does_not_vanish() -> None:
    """Adam would divide by epsilon."""
    table = rounding.dynamic_map(is_signed=False)
    values = torch.tensor([1.0, 1e-12, 0.0])
    for bits in (None, torch.tensor([65535, 65535, 65535], dtype=torch.int32)):
        codes, _ = rounding.to_int8(values, table, bits)
        assert codes.tolist() == [255, 1, 0]


def test_random_numbers_are_those_of_the_element() -> None:
    whole = rounding.random_bits(5, 0, 4096, CPU)
    assert torch.equal(whole[1000:3000], rounding.random_bits(5, 1000, 2000, CPU))
    assert not torch.equal(whole, rounding.random_bits(6, 0, 4096, CPU))
    for bits in (whole & 0xFFFF, whole >> 16 & 0xFFFF):
        assert abs(float(bits.float().mean()) / 65536 - 0.5) < 0.02 and len(set(bits.tolist())) > 3900


@pytest.mark.parametrize("kind, per_element", [("bf16", 4.0), ("int8", 2.125)])
def test_bytes(kind: Kind, per_element: float) -> None:
    weight = torch.zeros(64 * 100)
    weight.grad = torch.ones_like(weight)
    optimizer = optimizer_of(kind, weight, **KEYS)
    optimizer.step()
    assert sum(state.nbytes for state in optimizer.state[weight].values()) == per_element * weight.numel()


def test_a_slice_that_begins_within_a_block() -> None:
    with pytest.raises(ConfigError, match="begins within a block of 64 elements, because more than 1,024 ranks"):
        optimizer_of("int8", torch.zeros(10), 32, **KEYS)
    optimizer_of("bf16", torch.zeros(10), 32, **KEYS)
