"""Randomness as a function: a hash of (seed, position, stream, token), so that a replayed round draws the same noise.

No generator has a state here. A request's noise therefore depends neither on the batch it is in nor on how many tokens
a round emits, and a drafter that knows the seed can share the target's Gumbel noise without a message.
Source of the finaliser: splitmix64 (Steele, Lea, Flood, 2014), Stafford's variant 13.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_GUMBEL_STREAM = 0


class Role(IntEnum):
    """What a uniform number decides; numbers of different roles are independent, also at the same position."""

    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def gumbel_noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Return the Gumbel noise [vocab_size] float64 of one position."""
    return gumbel_rows([seed], [position], vocab_size)[0]


def gumbel_rows(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, salt: int = 0) -> torch.Tensor:
    """Return Gumbel noise [rows, vocab_size] float64; another `salt` gives an independent stream.

    A row depends on its own seed and position alone, and its first n numbers are those of a vocabulary of n.
    """
    keys = gumbel_keys(seeds, positions, salt)
    tokens = torch.arange(1, vocab_size + 1, dtype=torch.int64) * _signed(_GOLDEN)
    bits = keys[:, None] + tokens
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    bits = bits ^ _shifted(bits, 31)
    # 52 bits and a half: exact in float64, hence strictly inside (0, 1).
    uniforms = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return uniforms.log_().neg_().log_().neg_()


def gumbel_keys(seeds: Sequence[int], positions: Sequence[int], salt: int = 0) -> torch.Tensor:
    """Return the hash keys [rows] int64 that a row's noise is made of."""
    pairs = zip(seeds, positions, strict=True)
    keys = [_signed(_key(seed, position, salt << 8 | _GUMBEL_STREAM)) for seed, position in pairs]
    return torch.tensor(keys, dtype=torch.int64)


def uniform(seed: int, position: int, role: int) -> float:
    """Return a number strictly inside (0, 1) for `role` (a `Role`) at `position`."""
    return ((_mixed(_key(seed, position, role) + _GOLDEN) >> 12) + 0.5) * 2.0**-52


def _key(seed: int, position: int, stream: int) -> int:
    """Return 64 bits; keys that differ in only one argument never collide, as every step is a bijection."""
    state = 0
    for word in (seed, stream, position):
        state = _mixed((state + _GOLDEN) ^ (word & _MASK))
    return state


def _mixed(state: int) -> int:
    state &= _MASK
    state = (state ^ state >> 30) * _FIRST & _MASK
    state = (state ^ state >> 27) * _SECOND & _MASK
    return state ^ state >> 31


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the logical right shift; torch's own is arithmetic on int64."""
    return (bits >> count) & ((1 << 64 - count) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
