"""Reference kernels over lists of tensors: AdamW's step (arXiv 1711.05101), the norm of gradients, their scaling.

TransformerEngine passes `chunk_size`, `noop_flag` and `tensor_lists`, lists of equal length; results are written in
place.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ADAMW = 1  # the mode with decoupled weight decay


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step; the lists are gradients, parameters, both moments in float32 and, optionally, float32 masters.

    Parameters with a master get its rounded value.
    """
    gradients, parameters, first, second = tensor_lists[:4]
    masters = tensor_lists[4] if len(tensor_lists) > 4 else parameters
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, m, v, master in zip(gradients, parameters, first, second, masters, strict=True):
        gradient, value = gradient.float(), master.float()
        if mode != _ADAMW:
            gradient = gradient + weight_decay * value
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        change = (m / correction1) / ((v / correction2).sqrt() + epsilon)
        if mode == _ADAMW:
            change = change + weight_decay * value
        value = value - lr * change
        master.copy_(value)
        if master is not parameter:
            parameter.copy_(value)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    """Set the second list to the first times `scale`, and the flag to 1 if a result is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        noop_flag.logical_or_(~target.isfinite().all())


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """`multi_tensor_scale` by a number on the device, float32 [1]."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        noop_flag.logical_or_(~target.isfinite().all())


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """(norm of all tensors together, float32 [1]; with `per_tensor` the norm of each [n], else empty)."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)
