"""What a policy loss is. Apart from the losses, so that settings can be checked without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megatron_collab.config import Extension

if TYPE_CHECKING:
    from torch import Tensor


class PolicyTerms(NamedTuple):
    """Per token: the loss, the importance ratio (without gradient), and where the clip takes effect 1, else 0."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLossFunction = Callable[["Tensor", "Tensor", "Tensor", "Tensor", int], PolicyTerms]


class PolicyLoss(Extension):
    """Base of the losses that algo.loss may name as package.module:Class; a function will do as well.

    `whole_sequences`: it needs all trained tokens of a sequence on one rank, which parallel.cp > 1 does not give.
    """

    whole_sequences: ClassVar[bool] = False

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence: Tensor, sequences: int
    ) -> PolicyTerms:
        """The terms of the trained tokens of a micro-batch.

        The first three are float [N], `sequence` int64 [N]: the number, below `sequences`, of each token's sequence.
        """
        raise NotImplementedError
