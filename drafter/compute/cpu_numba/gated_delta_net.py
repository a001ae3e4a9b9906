"""Numba version of `compute/eager/gated_delta_net.py`: a gated delta rule layer in one compiled loop.

Runs head by head, so that a head's state stays in the nearest cache, and row by row within a head. Known rows
update the state in place, drafts a copy of it. No operations are fused: folding records into a state gives
the same bits as running their rows as known ones.

Legend: N rows, O outputs of the layer's projection, C channels, K key heads, V value heads, D key dim, F
value dim, T taps, W = T - 1, Z slots, P most drafts, R requests, M saves (request, rows, slot).
"""

# Numba's functions are typed when they are compiled, not by annotations.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false, reportOperatorIssue=false

from __future__ import annotations

import numpy as np
from numba import carray
from torch import Tensor

from ..eager import delta_rule as delta_net
from ..eager.attention_metadata import EagerPass
from ..layers.gated_delta_net import DeltaNetShape, states_of
from ..memory.kv_cache import PagedKVCache
from .element_ops import LIKE, exact, float_of, pointer, rounded
from .layers import sigmoid


class NumbaDeltaNet:
    __slots__ = ("_heads", "_shape", "_weights")

    def __init__(self, shape: DeltaNetShape) -> None:
        kind = shape.geometry
        weights = (shape.kernel_CT, shape.rate_V, shape.dt_bias_V, shape.norm_F)
        self._shape, self._weights = shape, tuple(tensor.data_ptr() for tensor in weights)
        self._heads = (kind.num_key_heads, kind.num_value_heads, kind.key_dim, kind.value_dim, kind.taps)

    def __call__(self, mixed_NO: Tensor, step: EagerPass, cache: PagedKVCache, layer: int) -> Tensor:
        shape, kind = self._shape, self._shape.geometry
        rows, memory = states_of(step.rows.states, cache)
        y_NG = mixed_NO.new_empty(len(mixed_NO), kind.num_value_heads * kind.value_dim)
        _run(
            mixed_NO.data_ptr(), y_NG.data_ptr(), len(mixed_NO), self._heads, self._weights,
            (shape.eps, delta_net.EPS), tuple(_of_layer(tensor, layer) for tensor in memory.tensors),
            (memory.num_slots, memory.max_drafts),
            (rows.slots_R, rows.num_rows_R, rows.num_drafts_R, rows.pending_R),
            np.array(rows.saves, dtype=np.int64).reshape(-1, 3), LIKE[mixed_NO.dtype],
        )  # fmt: skip
        return y_NG


def _of_layer(tensor: Tensor, layer: int) -> int:
    return tensor.data_ptr() + layer * tensor.stride(0) * tensor.element_size()


@exact
def _unit(x_D, scale, eps, out_D):
    total = np.float32(0)
    for d in range(len(x_D)):
        out_D[d] = float_of(x_D[d])
        total += out_D[d] * out_D[d]
    scale /= np.sqrt(total + np.float32(eps))
    for d in range(len(x_D)):
        out_D[d] *= scale


@exact
def _decay(state_DF, g):
    decay = np.float32(np.exp(np.float64(g)))
    for d in range(state_DF.shape[0]):
        for f in range(state_DF.shape[1]):
            state_DF[d, f] *= decay


@exact
def _write(state_DF, k_D, u_F):
    for d in range(state_DF.shape[0]):
        for f in range(state_DF.shape[1]):
            state_DF[d, f] += k_D[d] * u_F[f]


@exact
def _read(state_DF, x_D, out_F):
    for f in range(state_DF.shape[1]):
        out_F[f] = np.float32(0)
    for d in range(state_DF.shape[0]):
        for f in range(state_DF.shape[1]):
            out_F[f] += x_D[d] * state_DF[d, f]


@exact
def _step(state_DF, q_D, k_D, v_F, g, beta, u_F, out_F):
    """Run one row: update the state; write the row's update to `u` and its output to `out`."""
    _decay(state_DF, g)
    _read(state_DF, k_D, u_F)
    for f in range(len(u_F)):
        u_F[f] = beta * (float_of(v_F[f]) - u_F[f])
    _write(state_DF, k_D, u_F)
    _read(state_DF, q_D, out_F)


@exact
def _gate(out_F, norm_F, eps, z_F, y_F, like):
    total = np.float32(0)
    for f in range(len(out_F)):
        total += out_F[f] * out_F[f]
    scale = np.float32(1) / np.sqrt(total / np.float32(len(out_F)) + np.float32(eps))
    for f in range(len(out_F)):
        z = float_of(z_F[f])
        y_F[f] = rounded(out_F[f] * scale * norm_F[f] * (z * sigmoid(z)), like)


@exact
def _keep_window(window_WC, x_NC, count, out_WC):
    """Write the inputs before row `count`; those before row 0 come from `window`, which `out` may alias."""
    before = len(window_WC)
    for w in range(before):
        n = count - before + w
        for c in range(out_WC.shape[1]):
            out_WC[w, c] = x_NC[n, c] if n >= 0 else window_WC[count + w, c]


@exact
def _convolve(window_WC, x_NC, kernel_CT, like):
    """Convolve the inputs in place, from the last row backward, so that earlier inputs are still intact."""
    before = len(window_WC)
    for n in range(len(x_NC) - 1, -1, -1):
        for c in range(window_WC.shape[1]):
            total = np.float32(0)
            for t in range(before + 1):
                m = n - before + t
                total += float_of(x_NC[m, c] if m >= 0 else window_WC[m + before, c]) * kernel_CT[c, t]
            x_NC[n, c] = rounded(total * sigmoid(total), like)


@exact
def _take_inputs(x_nC, known, slot, pending, saves_M3, windows_ZWC, x_ZPC, window_WC):
    """Write the window before the first row to `window`; store saved windows and drafts' inputs."""
    _keep_window(windows_ZWC[slot], x_ZPC[slot], pending, window_WC)
    for m in range(len(saves_M3)):
        _keep_window(window_WC, x_nC, saves_M3[m, 1], windows_ZWC[saves_M3[m, 2]])
    _keep_window(window_WC, x_nC, known, windows_ZWC[slot])
    for n in range(known, len(x_nC)):
        x_ZPC[slot, n - known] = x_nC[n]


@exact
def _fold(state_DF, k_PD, u_PF, g_P, count):
    for p in range(count):
        _decay(state_DF, g_P[p])
        _write(state_DF, k_PD[p], u_PF[p])


@exact
def _beta_and_g(b, a, rate, dt_bias):
    b, a = np.float64(float_of(b)), np.float64(float_of(a)) + np.float64(dt_bias)
    softplus = max(a, 0.0) + np.log1p(np.exp(-abs(a)))
    return np.float32(1.0 / (1.0 + np.exp(-b))), np.float32(np.float64(rate) * softplus)


@exact
def _run_head(
    states_ZDF, slot, saves_M3, q_nD, k_nD, v_nF, b_n, a_n, rate, dt_bias, known, u_PF, g_P, out_nF
):
    """Run a head's rows after its records were folded; write states, drafts' u and g, and all outputs."""
    state_DF, save = states_ZDF[slot], 0
    u_F = np.empty(u_PF.shape[1], dtype=np.float32)
    for n in range(len(q_nD)):
        if n == known:
            state_DF = state_DF.copy()
        beta, g = _beta_and_g(b_n[n], a_n[n], rate, dt_bias)
        _step(state_DF, q_nD[n], k_nD[n], v_nF[n], g, beta, u_F, out_nF[n])
        if n >= known:
            u_PF[n - known], g_P[n - known] = u_F, g
        while save < len(saves_M3) and saves_M3[save, 1] == n + 1:
            states_ZDF[saves_M3[save, 2]] = state_DF
            save += 1


@exact
def _run(mixed, y, num_rows, heads, weights, eps, memory, sizes, rows, saves_M3, like):
    """Run a layer for all rows: convolution, delta rule per head from the folded state, gate and norm.

    Args:
        mixed, y: addresses of the projected rows, and of the result.
        heads: (key heads, value heads, key dim, value dim, taps).
        weights, memory: addresses of the kernel, rates, biases and norm; of `StateMemory`'s tensors.
        eps: of the norm after the gate, and of that of queries and keys.
        sizes: (slots of the memory, most drafts of a request).
        rows: (slot, rows, drafts, pending drafts) of each request.
        saves_M3: states to save on the way: (request, rows before, slot).
    """
    num_keys, num_values, key_dim, value_dim, taps = heads
    num_slots, maximum = sizes
    slots_R, num_rows_R, num_drafts_R, pending_R = rows
    fp32, group, before = np.float32(0), num_values // num_keys, taps - 1
    keys, values = num_keys * key_dim, num_values * value_dim
    channels = 2 * keys + values
    z, b, a = channels, channels + values, channels + values + num_values  # offsets of these in a row
    mixed_NO = carray(pointer(mixed, like), (num_rows, a + num_values))
    y_NG = carray(pointer(y, like), (num_rows, values))
    kernel_CT = carray(pointer(weights[0], fp32), (channels, taps))
    rate_V = carray(pointer(weights[1], fp32), (num_values,))
    dt_bias_V = carray(pointer(weights[2], fp32), (num_values,))
    norm_F = carray(pointer(weights[3], fp32), (value_dim,))
    states_ZVDF = carray(pointer(memory[0], fp32), (num_slots, num_values, key_dim, value_dim))
    windows_ZWC = carray(pointer(memory[1], like), (num_slots, before, channels))
    k_ZPKD = carray(pointer(memory[2], fp32), (num_slots, maximum, num_keys, key_dim))
    u_ZPVF = carray(pointer(memory[3], fp32), (num_slots, maximum, num_values, value_dim))
    g_ZPV = carray(pointer(memory[4], fp32), (num_slots, maximum, num_values))
    x_ZPC = carray(pointer(memory[5], like), (num_slots, maximum, channels))
    window_WC = np.empty_like(windows_ZWC[0])
    begin, save = 0, 0
    for r in range(len(slots_R)):
        slot, count, pending = slots_R[r], num_rows_R[r], pending_R[r]
        known, first_save = count - num_drafts_R[r], save
        while save < len(saves_M3) and saves_M3[save, 0] == r:
            save += 1
        saves_m3 = saves_M3[first_save:save]
        mixed_nO = mixed_NO[begin : begin + count]
        x_nC = mixed_nO[:, :channels]
        _take_inputs(x_nC, known, slot, pending, saves_m3, windows_ZWC, x_ZPC, window_WC)
        _convolve(window_WC, x_nC, kernel_CT, like)
        q_nD = np.empty((count, key_dim), dtype=np.float32)
        k_nD, out_nF = np.empty_like(q_nD), np.empty((count, value_dim), dtype=np.float32)
        for key in range(num_keys):
            at = key * key_dim
            for n in range(count):
                _unit(x_nC[n, at : at + key_dim], np.float32(key_dim**-0.5), eps[1], q_nD[n])
                _unit(x_nC[n, keys + at : keys + at + key_dim], np.float32(1), eps[1], k_nD[n])
            for head in range(key * group, (key + 1) * group):
                states_ZDF, u_PF, g_P = states_ZVDF[:, head], u_ZPVF[slot, :, head], g_ZPV[slot, :, head]
                _fold(states_ZDF[slot], k_ZPKD[slot, :, key], u_PF, g_P, pending)
                at = head * value_dim
                v_nF = x_nC[:, 2 * keys + at : 2 * keys + at + value_dim]
                b_n, a_n = mixed_nO[:, b + head], mixed_nO[:, a + head]
                of_head = (rate_V[head], dt_bias_V[head])
                _run_head(
                    states_ZDF, slot, saves_m3, q_nD, k_nD, v_nF, b_n, a_n, *of_head, known, u_PF, g_P, out_nF
                )
                for n in range(count):
                    z_F = mixed_nO[n, z + at : z + at + value_dim]
                    _gate(out_nF[n], norm_F, eps[0], z_F, y_NG[begin + n, at : at + value_dim], like)
            for n in range(known, count):
                k_ZPKD[slot, n - known, key] = k_nD[n]
        begin += count
