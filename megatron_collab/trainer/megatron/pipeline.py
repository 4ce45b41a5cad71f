"""Communication between pipeline stages, with shapes from the plan of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

# Makes the communicator of one pass over micro-batches of these lengths, in positions on this context-parallel rank.
Communicator = Callable[[TransformerConfig, Sequence[int]], P2PCommunicator]


class PlannedCommunicator(P2PCommunicator):
    """The communicator of one pass of a pipeline over its micro-batches; exchanges no shapes.

    Packed micro-batches differ in length. For these Megatron sends every tensor's shape first, and the host waits for
    the device to read it. All stages of a pipeline have the same micro-batches, so each stage knows the shapes that it
    receives, in the order of the schedule, forward and backward.
    """

    def __init__(self, config: TransformerConfig, lengths: Sequence[int]) -> None:
        """`lengths`: positions of every micro-batch on this context-parallel rank."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(lengths), chunks, config.microbatch_group_size_per_vp_stage)
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [(length // ranks, 1, config.hidden_size) for length in lengths]
        computed = [shapes[number] for number, _ in table]
        # The output of every chunk but the last wraps around from the last stage to the first, and its gradient back.
        wrapping = [shapes[number] for number, chunk in table if chunk]
        stage, last = self.pp_group.rank(), self.pp_group.size() - 1
        self._from_previous = iter(wrapping if stage == 0 else computed)
        self._from_next = iter(wrapping if stage == last else computed)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Shapes [positions of this rank, 1, hidden] of the tensors from the previous and from the next stage."""
        return next(self._from_previous) if recv_prev else (), next(self._from_next) if recv_next else ()
