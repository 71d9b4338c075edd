"""A linear layer that is fast for the handful of rows a decoding round has.

A decoding step multiplies 1 to 64 rows with every weight, so it is bound by reading the weights.  PyTorch's default
CPU kernel wastes most of that bandwidth between 2 and 32 rows; oneDNN with a weight reordered once is 2-3x faster.
That path is a private operator of PyTorch, hence the probe and the fallback.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Rows for which the reordered layout is tuned; it is correct, and still fast, for any other number.
_PACKED_ROWS = 8


@cache
def _onednn_works() -> bool:
    """Whether this build of PyTorch has the prepacked oneDNN linear, checked on numbers rather than on a version."""
    try:
        weight, x = torch.randn(48, 32), torch.randn(3, 32)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return torch.allclose(y, F.linear(x, weight), atol=1e-4)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


class Linear(nn.Linear):
    """`nn.Linear` with an optional, irreversible `pack()` for inference in fp32 on a CPU."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)
        self._packed: Tensor | None = None

    def pack(self, keep_weight: bool = False) -> None:
        """Reorder the weight for oneDNN where that helps; the plain copy is dropped unless something else reads it."""
        if self.weight.dtype != torch.float32 or self.weight.device.type != "cpu" or not _onednn_works():
            return
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().contiguous(), _PACKED_ROWS)
            if not keep_weight:
                self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return super().forward(x)


def pack(module: nn.Module) -> None:
    """Pack every `Linear` below `module`."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.pack()
