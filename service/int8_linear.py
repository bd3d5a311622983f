"""A matrix product whose weight is int8 with a scale for each output: half of bf16's memory, for drafts alone."""

import torch

from .errors import ModelUnsupportedError

LANES = 16
ROWS_AT_ONCE = 8192


class Int8Linear:
    """`y = x W^T + b` by torch's int8 kernel, with each row of W rounded to 127 steps either way.

    Inputs and outputs keep their dtype. Raises: ModelUnsupportedError where there is no such kernel.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            raise ModelUnsupportedError(f"int8 weights serve bfloat16 and float32 on a CPU, not {weight.dtype} here")
        if self.in_features % LANES:
            raise ModelUnsupportedError(f"int8 weights need inputs by the {LANES}; a layer has {self.in_features}")
        self._scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
        parts = zip(weight.split(ROWS_AT_ONCE), self._scale.split(ROWS_AT_ONCE), strict=True)
        self._weight = torch.cat([_rounded(part, scale) for part, scale in parts])
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; shapes: [rows, in] to [rows, out]."""
        out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        return out if self._bias is None else out + self._bias


def _rounded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scale.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
