"""Reference kernels are installed for rehearsals alone: a run on a CPU has the local layers."""

from __future__ import annotations

import pytest
import torch

from megatron_collab.config import Config
from megatron_collab.patches.megatron import with_reference_kernels
from megatron_collab.rehearsal.te_cpu.install import install
from megatron_collab.trainer.megatron import config as megatron_config

pytestmark = pytest.mark.seconds


def test_a_run_on_a_cpu_has_no_engine(one_rank: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's Python is not where Megatron would find it; the kernels would come too late."""
    from megatron.core.extensions import transformer_engine

    assert not with_reference_kernels() and not transformer_engine.HAVE_TE
    monkeypatch.setattr(one_rank.model, "dtype", "bfloat16")
    assert not megatron_config._engine(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"before the first import of megatron\.core"):
        install()
