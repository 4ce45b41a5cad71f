"""Interface of policy losses, apart from the losses so that settings can be checked without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megatron_collab.settings import Extension

if TYPE_CHECKING:
    from torch import Tensor


class PolicyTerms(NamedTuple):
    """Per token: the loss, the importance ratio (without gradient), and 1 if the clip takes effect, else 0."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLossFunction = Callable[["Tensor", "Tensor", "Tensor", "Tensor", int], PolicyTerms]


class PolicyLoss(Extension):
    """Base of the losses that algo.loss may name as package.module:Class; a plain function works too.

    `whole_sequences`: the loss needs all trained tokens of a sequence on one rank, so it excludes parallel.cp > 1.
    """

    whole_sequences: ClassVar[bool] = False

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence: Tensor, sequences: int
    ) -> PolicyTerms:
        """The terms of the trained tokens of a micro-batch.

        The first three are float [N]; `sequence` is int64 [N], each token's sequence index, below `sequences`.
        """
        raise NotImplementedError
