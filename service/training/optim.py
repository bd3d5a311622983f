"""The optimisers and the learning-rate schedule every recipe uses."""

import torch
from torch import nn


def optimizers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the inner matrices and AdamW for embeddings, heads and vectors.

    Muon's update is scaled to AdamW's RMS, so one learning rate serves both.
    Source: Jordan et al. 2024 (Muon); Liu et al., arXiv 2502.16982 (RMS matching).
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        reads_out = "lm_head" in name or ("medusa_head" in name and "linear" not in name)
        inner = parameter.ndim == 2 and "embed" not in name and not reads_out
        (matrices if inner else others).append(parameter)
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        found.append(
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        )
    return found


def learning_rate(step: int, num_steps: int, peak: float, warmup_steps: int) -> float:
    """Return the rate of `step` (0-based): linear warm-up, a plateau, then a straight line down over the last third.

    The plateau does not depend on `num_steps`, so a run can be cut short or extended when it resumes.
    Source: warmup-stable-decay, Hu et al., arXiv 2404.06395.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_steps = max(1, num_steps // 3)
    return peak * min(1.0, max(0.02, (num_steps - step) / decay_steps))


def set_learning_rate(found: list[torch.optim.Optimizer], lr: float) -> None:
    """Give every parameter group the rate `lr`."""
    for optimizer in found:
        for group in optimizer.param_groups:
            group["lr"] = lr
