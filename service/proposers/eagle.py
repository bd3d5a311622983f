"""An EAGLE-1 or EAGLE-2 head: one decoder layer without its first norm, drafting the target's last hidden state.

The two share their files; EAGLE-2 is a better tree over the same head. Source: arXiv 2401.15077, 2406.16858.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..errors import ModelUnsupportedError
from ..models import LoadedModel
from ..packed_linear import Head
from .checkpoint import check_target, fill, read_config, read_tensors, without_copies
from .head_block import BlockShape, HeadBlock, block_shape

LOG = logging.getLogger(__name__)
EMBEDDING = "embed_tokens.weight"


class EagleHead(nn.Module):
    """Predicts what the target's final norm will give; `readout`, the target's own head, makes tokens of it."""

    def __init__(
        self, shape: BlockShape, tap: int, vocab: int, readout: Callable[[torch.Tensor], torch.Tensor],
        fc_bias: bool = True, own_embedding: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if own_embedding:
            self.embed_tokens = nn.Embedding(vocab, shape.hidden)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=fc_bias)
        self.layers = nn.ModuleList([HeadBlock(shape, input_norms=0)])
        self.taps = (tap,)
        self.token_map = None
        self._readout = readout

    @property
    def block(self) -> HeadBlock:
        """The layer, whose keys and values are kept."""
        (layer,) = self.layers
        assert isinstance(layer, HeadBlock)
        return layer

    @property
    def embedding(self) -> nn.Module | None:
        """Its own embedding of tokens, if it has one."""
        return getattr(self, "embed_tokens", None)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states as they are."""
        return taps

    def enter(self, hidden: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fused row, as the layer's residual and as its attention's input."""
        fused = self.fc(torch.cat([embedded, hidden], -1))
        return fused, fused

    def leave(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits over the target's vocabulary, and `out`, which stands for the target's next hidden state."""
        return self._readout(out), out


def load_eagle(folder: Path, model: LoadedModel, readout: Head) -> EagleHead:
    """Return the head in `folder`, made for `model`.

    Raises: ModelUnsupportedError that names missing and unexpected tensors, or says how the head does not fit.
    """
    stated = read_config(folder)
    check_target(stated, model, folder)
    if int(stated.get("num_hidden_layers", 1)) != 1:
        raise ModelUnsupportedError(f"{folder}: EAGLE heads of more than one layer are not supported")
    tensors = read_tensors(folder)
    if "fc.weight" not in tensors or tensors["fc.weight"].shape[1] != 2 * tensors["fc.weight"].shape[0]:
        raise ModelUnsupportedError(f"{folder} is no EAGLE-1 or EAGLE-2 head: those have fc.weight [hidden, 2 hidden]")
    embed = model.trunk.get_input_embeddings().weight  # type: ignore[operator]  # a transformers model
    tensors = without_copies(tensors, {EMBEDDING: embed})
    shape = block_shape(stated, qkv_bias=bool(stated.get("qkv_bias", stated.get("attention_bias", False))))
    if shape.hidden != model.config.hidden_size:
        raise ModelUnsupportedError(
            f"{folder} was made for hidden states of {shape.hidden}; this target's are {model.config.hidden_size}"
        )
    fc_bias, own = bool(stated.get("bias", True)), EMBEDDING in tensors
    head = EagleHead(shape, int(model.config.num_hidden_layers), model.shape.vocab_size, readout, fc_bias, own)
    fill(head.to(model.dtype), tensors, folder)
    LOG.info(
        "EAGLE head %s: reads after the final norm, joins [embedding, hidden], fc bias %s, embedding %s, recycles raw",
        folder, fc_bias, "its own" if own else "the target's",
    )  # fmt: skip
    return head.eval().requires_grad_(False)
