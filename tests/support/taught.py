"""Drafting heads that learnt by heart what a tiny target writes, so that they are often right; files as published."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specserve.service.messages import AttachedName
from specserve.service.proposers.eagle import EagleHead
from specserve.service.proposers.eagle3 import Eagle3Config, Eagle3Head, save_eagle3
from specserve.service.proposers.head_block import Attend, BlockShape
from specserve.service.proposers.medusa import MedusaHeads, save_medusa
from specserve.service.proposers.mtp import MtpHead, save_mtp
from specserve.service.training.heads import Labelled, frozen_target, unrolled_loss
from specserve.service.training.medusa import NUM_HEADS, medusa_loss

from .heads import write_head

NUM_STEPS = 60
NUM_ROWS = 3
"""Drafted rows unrolled in training."""


class CallableEagle(EagleHead):
    """An EAGLE-1 head that is trained as the others are."""

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual, x = self.enter(hidden, embedded)
        return self.leave(self.block(residual, x, positions, attend))


def taught_heads(folder: Path, target_dir: Path, texts: Sequence[Sequence[int]]) -> dict[AttachedName, Path]:
    """Return the folders of one head of every family, trained on `texts` of one length."""
    target, ids = frozen_target(target_dir), torch.tensor(texts)
    torch.manual_seed(3)
    shape, layers = target.config, int(target.config.num_hidden_layers)
    hidden, vocab, heads, kv_heads = shape.hidden_size, shape.vocab_size, shape.num_attention_heads, 2
    block = BlockShape(hidden, hidden, heads, kv_heads, shape.head_dim, 2 * hidden, shape.head_dim, shape.rms_norm_eps)
    readout = partial(functional.linear, weight=target.get_output_embeddings().weight)

    eagle = CallableEagle(block, layers, vocab, readout)
    eagle3 = Eagle3Head(
        Eagle3Config(hidden, hidden, heads, kv_heads, shape.head_dim, 2 * hidden, vocab // 2, vocab, (2, 3, layers))
    )
    _start_as_passing_on(eagle3, target, ids)
    mtp = MtpHead(block, layers, vocab, readout)
    for head in (eagle, eagle3, mtp):
        _teach(head, partial(unrolled_loss, head, Labelled(target, head.taps), ids, NUM_ROWS, 0.8))
    medusa = MedusaHeads(NUM_HEADS, 1, hidden, vocab, layers)
    _teach(medusa, partial(medusa_loss, medusa, Labelled(target, medusa.taps), ids))

    folders: dict[AttachedName, Path] = {name: folder / name for name in ("eagle", "eagle3", "medusa", "mtp")}
    _save_eagle(eagle, folders["eagle"])
    save_eagle3(eagle3, folders["eagle3"], {})
    save_medusa(medusa, folders["medusa"], {})
    save_mtp(mtp, folders["mtp"], layers, {})
    return folders


def _start_as_passing_on(head: Eagle3Head, target: Any, ids: torch.Tensor) -> None:
    """Give an EAGLE-3 head the target's last state and its head's rows, for the tokens of `ids` first of all."""
    draft_vocab, vocab, hidden = head.config.draft_vocab, head.config.vocab, head.config.hidden
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    known = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    head.d2t.copy_(known - torch.arange(draft_vocab))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[known])
        head.fc.weight[:, -hidden:] += torch.eye(hidden)


def _teach(head: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]  # torch's stubs
        optimizer.step()
    head.eval()


def _save_eagle(head: EagleHead, folder: Path) -> None:
    shape = head.block.shape
    config = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "bias": True,
    }
    write_head(folder, config, {name: tensor.detach() for name, tensor in head.state_dict().items()})
