"""Muon for many small matrices: those of one shape are updated together.

The update is that of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, which starts about twenty kernels
for each matrix; for a small model on a GPU these starts take longer than the forward pass. Called by ``train.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

#: Coefficients of the Newton-Schulz iteration, and the number of iterations, as in ``torch.optim.Muon``.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_EPS = 1e-7


def orthogonalized(stack: Tensor, precision: torch.dtype) -> Tensor:
    """Approximately the nearest orthogonal matrix of each matrix ``[n, rows, columns]`` with rows <= columns."""
    found = stack.to(precision)
    found = found / torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        update = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        found = torch.baddbmm(found, update, found, beta=_A)
    return found


class StackedMuon(torch.optim.Optimizer):
    """Muon whose step works on stacks of matrices that have the same shape (or transposed shape)."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        precision: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.precision = precision

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every matrix that has a gradient."""
        if closure is not None:
            raise ValueError("StackedMuon takes no closure: compute the gradients before step().")
        for group in self.param_groups:
            stacks: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    stacks[torch.Size(sorted(matrix.shape))].append(matrix)
            for matrices in stacks.values():
                self._update(matrices, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, matrices: list[Tensor], rate: float, weight_decay: float, momentum: float) -> None:
        flat = [matrix.shape[0] <= matrix.shape[1] for matrix in matrices]
        grads = torch.stack([m.grad if wide else m.grad.T for m, wide in zip(matrices, flat, strict=True)])  # type: ignore[union-attr]
        state = self.state[matrices[0]]  # the momentum of the whole stack
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(grads)
        state["momentum"].lerp_(grads, 1 - momentum)
        updates = orthogonalized(grads.lerp(state["momentum"], momentum), self.precision).to(matrices[0].dtype)
        parts = [part if wide else part.T for part, wide in zip(updates, flat, strict=True)]
        torch._foreach_mul_(matrices, 1 - rate * weight_decay)
        torch._foreach_add_(matrices, parts, alpha=-rate * 0.2 * max(matrices[0].shape) ** 0.5)
