"""A matrix product whose weight is int8 with a scale for each output: half of bf16's memory, for drafts alone."""

import torch
from torch.nn import functional

from .errors import ModelUnsupportedError
from .kernels.native import DTYPES, library

PANEL = 32
ROWS_AT_ONCE = 256 * PANEL


class Int8Linear:
    """`y = x W^T + b` by the project's kernel, with each row of W rounded to 127 steps either way.

    Inputs and outputs keep their dtype; a row's result is the same whatever the number of rows, as `PackedLinear`'s is.

    Raises: ModelUnsupportedError where there is no such kernel.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        native = library()
        if native is None or weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            raise ModelUnsupportedError(f"int8 weights need kernels for bfloat16 or float32, not {weight.dtype} here")
        self.out_features, self.in_features = weight.shape
        if self.in_features % 2:
            raise ModelUnsupportedError(f"int8 weights need an even number of inputs; a layer has {self.in_features}")
        self._native = native
        self._dtype = DTYPES[weight.dtype]
        self._bias = bias
        steps = (weight.abs().amax(1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
        parts = zip(weight.split(ROWS_AT_ONCE), steps.split(ROWS_AT_ONCE), strict=True)
        self._weight = torch.cat([_panels(part, some) for part, some in parts])
        self._scales = steps / 2**24

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; shapes: [rows, in] to [rows, out]."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        self._native.specserve_product_int8(
            self._dtype, x.data_ptr(), self._weight.data_ptr(), self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(), out.data_ptr(), x.shape[0], self.out_features,
            self.in_features,
        )  # fmt: skip
        return out


def _panels(weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return rounded rows as the kernel reads them, [out / 32, in / 2, 16, 2, 2].

    The four bytes of a lane are outputs c and c + 16 of an even input, then of the odd one after it.
    """
    rounded = (weight.float() / steps.unsqueeze(1)).round().to(torch.int8)
    rounded = functional.pad(rounded, (0, 0, 0, -len(rounded) % PANEL))
    return rounded.view(-1, 2, PANEL // 2, rounded.shape[1] // 2, 2).permute(0, 3, 2, 4, 1).contiguous()
