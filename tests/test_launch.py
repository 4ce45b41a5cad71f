"""What is refused before the ranks are started."""

from __future__ import annotations

import pytest

from megatron_collab import launch
from megatron_collab.config import ConfigError, parse


def test_several_nodes_need_torchrun_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(["experiment=train_70b", "train.stage=sft"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ConfigError, match=r"^launch\.nodes=8: .*torchrun --nnodes 8 --nproc-per-node 8 on each node"):
        launch.prepare(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(ConfigError, match=r"model\.path"):  # the next thing that is not there
        launch.prepare(config)


def test_sampling_stays_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(ConfigError, match=r"^launch\.nodes=8: weights reach the servers .* set launch\.nodes=1, or"):
        launch.prepare(parse(["experiment=train_70b"]))
