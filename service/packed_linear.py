"""A matrix product whose weight is laid out once for the processor's own kernels."""

import torch
from torch import nn
from torch.nn import functional

PROBED_ROWS = (2, 3, 5, 9, 17, 33, 65, 129)


class PackedLinear:
    """`y = x W^T + b`. In bf16 on a CPU the weight is reordered once for oneDNN, which reads it about twice as fast as
    `F.linear` does at few rows, with the same bits; elsewhere it is `F.linear` itself.

    `reproducible` says whether a row's result was seen to be the same, bit for bit, whatever the number of rows; on
    processors where a single row is rounded in a way of its own, single rows are computed as two.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight
        self._pads_one_row = False
        self.reproducible = False
        if self._packed:
            self._probe(weight)

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product; shapes: [rows, in] to [rows, out]."""
        if self._pads_one_row and x.shape[0] == 1:
            return self._product(x.expand(2, -1).contiguous())[:1]
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return functional.linear(x, self._weight, self._bias)

    @torch.inference_mode()
    def _probe(self, weight: torch.Tensor) -> None:
        """Find out how rows round here, on rows made of the weights themselves."""
        x = weight[: max(PROBED_ROWS)].roll(1, 1).contiguous()
        pairs = [x[:rows] for rows in PROBED_ROWS if rows <= x.shape[0]]
        if not pairs:
            return
        two = self._product(x[:2])
        self._pads_one_row = not torch.equal(self._product(x[:1]), two[:1])
        whole = self._product(pairs[-1])
        self.reproducible = all(torch.equal(self._product(some), whole[: some.shape[0]]) for some in pairs)


class Head:
    """The LM head: logits of hidden states, soft cap included."""

    def __init__(self, module: nn.Module, softcap: float | None) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        bias = getattr(module, "bias", None)
        self._linear = PackedLinear(weight.detach(), None if bias is None else bias.detach())
        self._softcap = softcap

    @property
    def reproducible(self) -> bool:
        """Whether a row's logits do not depend on how many rows there are."""
        return self._linear.reproducible

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] in the model's dtype for `hidden` [rows, hidden]."""
        logits = self._linear(hidden)
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
