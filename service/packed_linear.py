"""A matrix product whose weight is laid out once for the processor, and whose rows do not mind company."""

import torch
from torch import nn
from torch.nn import functional

from .int8_linear import Int8Linear
from .kernels.native import DTYPES, library

PANEL = 32


class PackedLinear:
    """`y = x W^T + b`, by the project's kernel on a CPU and by `F.linear` elsewhere.

    In the kernel each output is one accumulator that runs through the inputs in order: a row's result is the same, bit
    for bit, whatever the number of rows. Measured against `F.linear` in bf16: 2 to 2.9 times as fast at 1 to 16
    rows, 1.9 times at 256 (table in DECISIONS.md).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._native = library() if weight.device.type == "cpu" and weight.dtype in DTYPES else None
        self._weight = weight if self._native is None else panels(weight)
        self._dtype = DTYPES.get(weight.dtype, -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; shapes: [rows, in] to [rows, out]."""
        if self._native is None:
            return functional.linear(x, self._weight, self._bias)
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        self._native.specserve_product(
            self._dtype, x.data_ptr(), self._weight.data_ptr(), None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(), x.shape[0], self.out_features, self.in_features,
        )  # fmt: skip
        return out


Linear = PackedLinear | Int8Linear
LinearKind = type[PackedLinear] | type[Int8Linear]


def panels(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out, in] as the kernel reads it: panels of 32 outputs, all of them for one input side by side.

    Shapes: [out / 32, in, 32]; in bf16 output c of a panel lies beside output c + 16, so that one load of 64 bytes is
    two vectors of floats after a shift and a mask.
    """
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL)
    padded = functional.pad(weight, (0, 0, 0, count * PANEL - outputs))
    if weight.dtype == torch.bfloat16:
        return padded.view(count, 2, PANEL // 2, inputs).permute(0, 3, 2, 1).contiguous()
    return padded.view(count, PANEL, inputs).permute(0, 2, 1).contiguous()


class Head:
    """The LM head: logits of hidden states, soft cap included."""

    def __init__(self, module: nn.Module, softcap: float | None, linear: LinearKind = PackedLinear) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        bias = getattr(module, "bias", None)
        self.device = weight.device
        self._linear = linear(weight.detach(), None if bias is None else bias.detach())
        self._softcap = softcap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] in the model's dtype for `hidden` [rows, hidden]."""
        logits = self._linear(hidden)
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
