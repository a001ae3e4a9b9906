"""Memory of a recurrent layer per request: plain arithmetic, as `kv_cache_groups.KVCacheSpec`.

A gated delta net (`drafter/compute/eager/delta_rule.py`) stores no K/V per token, but one state of all tokens
and the last inputs of its convolution. Drafts add records until it is known which are accepted. Used to count
memory, and by `drafter/compute/memory/recurrent_state_cache.py`, which allocates it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_FP32 = 4


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """A request's data in a recurrent layer, on one rank.

    Attributes:
        num_key_heads, num_value_heads: heads of queries and keys; heads of values, a multiple of these. Each
            value head has a state of its own.
        key_dim, value_dim: sizes per head: a state is key_dim x value_dim.
        taps: inputs that the convolution sees for a row, including its own.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: all heads' queries, then keys, then values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def rank(self, ranks: int) -> RecurrentStateSpec:
        keys, values = self.num_key_heads // ranks, self.num_value_heads // ranks
        return replace(self, num_key_heads=keys, num_value_heads=values)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes per request: states in fp32, the convolution's window in `itemsize` bytes."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return _FP32 * state + itemsize * (self.taps - 1) * self.channels

    def record_bytes(self, itemsize: int) -> int:
        """Return the bytes per draft row: key, update and decay in fp32, and the convolution's input."""
        keys = self.num_key_heads * self.key_dim
        written = self.num_value_heads * (self.value_dim + 1)
        return _FP32 * (keys + written) + itemsize * self.channels
