"""Muon and AdamW as one optimizer, and a running average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .precision import product_dtype

# Any: a snapshot is torch.save's own tree of tensors, numbers and containers.
Snapshot = dict[str, Any]

_TABLES = ("embed", "lm_head", "codebook")  # 2-D, but with a row per token


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with products in fp32 instead of bf16, for CPUs where these are faster.

    Nesterov momentum, and learning rates adjusted by "match_rms_adamw".
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state, momentum = self.state[matrix], group["momentum"]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                buffer = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonalized(
                    matrix.grad.lerp(buffer, momentum), group["ns_coefficients"], group["ns_steps"]
                )
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int
) -> torch.Tensor:
    """Return about U V^T of the SVD U S V^T, by Newton-Schulz steps x <- (a + b x x^T + c (x x^T)^2) x.

    Source: https://kellerjordan.github.io/posts/muon.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class HybridOptimizer:
    """Muon for 2-D weights between hidden layers, and AdamW for the rest, with one learning rate factor."""

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float) -> None:
        matrices, others = split_parameters(model)
        in_bf16 = product_dtype(matrices[0].device.type) is torch.bfloat16
        muon = (torch.optim.Muon if in_bf16 else Float32Muon)(
            matrices, lr=matrix_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._optimizers: list[torch.optim.Optimizer] = [muon, adamw]
        self._base_lrs = [matrix_lr, other_lr]

    def step(self, lr_factor: float) -> None:
        for optimizer, base_lr in zip(self._optimizers, self._base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base_lr * lr_factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> Snapshot:
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self._optimizers)}

    def load_state_dict(self, state: Snapshot) -> None:
        for i, optimizer in enumerate(self._optimizers):
            optimizer.load_state_dict(state[str(i)])


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and not any(part in name for part in _TABLES)
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


class WeightAverage:
    """Running average of a model's weights: exponential over `horizon_steps`, a plain mean before."""

    def __init__(self, model: nn.Module, horizon_steps: int) -> None:
        self._model, self._horizon_steps = model, horizon_steps
        self.num_steps = 0
        self.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def move(self) -> None:
        self.num_steps += 1
        share = 1.0 / min(self.num_steps, self._horizon_steps)
        for name, tensor in self._model.state_dict().items():
            self.state[name].lerp_(tensor, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        weights = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._model.load_state_dict(self.state)
        try:
            yield
        finally:
            self._model.load_state_dict(weights)

    def state_dict(self) -> Snapshot:
        return {"num_steps": self.num_steps, "weights": self.state}

    def load_state_dict(self, state: Snapshot) -> None:
        self.num_steps = state["num_steps"]
        for name, tensor in state["weights"].items():
            self.state[name].copy_(tensor)
