"""The search for layouts: only what validation and the memory plan accept, the fastest first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest

from megatron_collab.config import CONF, compose
from megatron_collab.launch import validate
from megatron_collab.launch.layout import check_layout_of_model
from megatron_collab.launch.trainer_specs import trainer_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning import layouts
from megatron_collab.planning.layouts import UNCOUNTED, fastest_layouts, layout_of
from megatron_collab.planning.memory import GIB, peak, plan_memory
from megatron_collab.planning.step_time import step_time

SHAPE = ModelShape.from_hf(json.loads((CONF / "shapes" / "Qwen2.5-7B-Instruct.json").read_text()))  # 28 heads
LLAMA = ModelShape.from_hf(json.loads((CONF / "shapes" / "Llama-3.1-8B-Instruct.json").read_text()))
OPTIONS = ["experiment=train_8b", "model.path=models/Qwen2.5-7B-Instruct"]


@pytest.mark.processes
@pytest.mark.parametrize("gib", [79.6, 55.0])
def test_the_fastest_layouts_that_fit(gib: float) -> None:
    config = compose(OPTIONS)
    listed = fastest_layouts(config, SHAPE, gib * GIB, 512, 3)
    assert len({tuple(layout.options[:5]) for layout in listed}) == 3
    assert all(first.time.seconds <= later.time.seconds + 0.005 for first, later in pairwise(listed))
    for layout in listed:
        composed = compose([*OPTIONS, *layout.options])
        validate.check_settings(composed)
        check_layout_of_model(composed, SHAPE)
        assert max(map(peak, plan_memory(composed, SHAPE))) == layout.peak <= gib * GIB - UNCOUNTED
        assert step_time(composed, SHAPE, 512) == layout.time
        assert layout.changes(composed) == []
    assert listed[0].time.seconds <= min(times_without_a_pipeline(gib)) + 0.005


@pytest.mark.seconds
def test_context_parallel_twins_take_no_place() -> None:
    """Sequences are longer than a micro-batch here, so that context parallelism is tried."""
    config = compose(["experiment=train_8b", "rollout.context_length=32768", "train.tokens_per_micro_batch=8192"])
    listed = [trainer_layout(layout.config) for layout in fastest_layouts(config, LLAMA, 79.6 * GIB, 512, 5)]
    assert len({replace(layout, cp=1) for layout in listed}) == 5


def times_without_a_pipeline(gib: float) -> Iterator[float]:
    """Seconds of the layouts of one stage that fit, counted one by one."""
    for tp, recompute in product((1, 2, 4), ("none", "selective", "full")):
        settings = [f"parallel.tp={tp}", f"parallel.sequence_parallel={tp > 1}", f"parallel.recompute={recompute}"]
        config = compose([*OPTIONS, *settings])
        if max(map(peak, plan_memory(config, SHAPE))) <= gib * GIB - UNCOUNTED:
            yield step_time(config, SHAPE, 512).seconds


def test_nothing_fits_a_small_gpu() -> None:
    assert fastest_layouts(compose(OPTIONS), SHAPE, 20 * GIB, 512, 1) == []


def test_a_layout_names_what_it_changes() -> None:
    config = compose(OPTIONS)
    layout = layout_of(config, SHAPE, 80 * GIB, 512)
    assert layout.changes(compose([*OPTIONS, "parallel.recompute=full"])) == ["parallel.recompute=none"]
    assert set(layouts._VARIED) == {option.partition("=")[0] for option in layout.options}
