"""Layouts and precisions that cannot work on this machine or with this model, refused in one line."""

from __future__ import annotations

from functools import partial

from megatron_collab.config import Config, ModelConfig, require
from megatron_collab.models import parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device

# recipe: first compute capability that TransformerEngine 2.20 runs it on, the first that it does not, and why
_FP8_DEVICES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "delayed": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "tensorwise": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "blockwise": ((9, 0), (100, 0), "scales by block came with Hopper"),
    "mxfp8": ((10, 0), (12, 0), "MXFP8 is a format of Blackwell's data centre devices, below 12.0"),
}


def validate_layout(config: Config) -> None:
    """What can be said without the model and without this machine."""
    check = partial(require, config=config)
    _check_fp8(config)
    parallel, ranks = config.parallel, parallel_layout.ranks(config)
    size = parallel.tp * parallel.pp * parallel.cp
    check(
        ranks % size == 0,
        f"<parallel.tp> x <parallel.pp> x <parallel.cp> does not divide the {ranks} ranks (<launch.nodes> x "
        f"<launch.nproc_per_node>); set launch.nproc_per_node so that they are a multiple of {size}",
    )
    message = "<parallel.sequence_parallel>: needs parallel.tp > 1; set it to false"
    check(parallel.tp > 1 or not parallel.sequence_parallel, message)
    check(parallel.pp > 1 or parallel.vpp == 1, "<parallel.vpp>: needs parallel.pp > 1; set parallel.vpp=1")
    stage = ranks // parallel.pp
    message = f"<parallel.ep>: does not divide the {stage} ranks of a pipeline stage; choose a divisor"
    check(stage % parallel.ep == 0, message)
    _, multiple = parallel_layout.alignment(config)
    tokens = config.train.tokens_per_micro_batch
    fitting = -(-tokens // multiple) * multiple
    message = f"must be a multiple of {multiple} with this layout and precision; set {fitting}"
    check(tokens % multiple == 0, f"<train.tokens_per_micro_batch>: {message}")


def check_machine(config: Config) -> None:
    """What TransformerEngine and the device of this machine must be able to do."""
    check = partial(require, config=config)
    for setting, used, off in (("parallel.cp", config.parallel.cp > 1, "1"), ("model.fp8", config.model.fp8, "null")):
        if used:
            engine = device.probe("transformer_engine")
            check(engine.found, f"<{setting}>: needs TransformerEngine ({engine.detail}); set {setting}={off}")
    if config.model.fp8:
        (first, end, reason), found = _FP8_DEVICES[config.model.fp8_recipe], device.capability()
        here = "one of {}.{}".format(*found) if found else "none"
        check(
            found is not None and first <= found < end,
            f"<model.fp8_recipe>: needs a device of compute capability {first[0]}.{first[1]} or higher ({reason}), "
            f"here is {here}; choose another recipe, or set model.fp8=null",
        )


def check_shape(config: Config, shape: ModelShape) -> None:
    """The sizes of the model against the layout and FP8."""
    check = partial(require, config=config)
    parallel, experts = config.parallel, shape.experts
    sizes = {"attention heads": shape.heads, "key/value heads": shape.kv_heads, "feed-forward width": shape.ffn}
    for what, count in sizes.items():
        check(count % parallel.tp == 0, f"<parallel.tp>: does not divide the model's {count} {what}; choose a divisor")
    stages = "<parallel.pp> x <parallel.vpp>" if parallel.vpp > 1 else "<parallel.pp>"
    message = f"{stages}: the model has only {shape.layers} layers; choose at most {shape.layers} stages"
    check(parallel.pp * parallel.vpp <= shape.layers, message)
    if experts is None:
        check(parallel.ep == 1, "<parallel.ep>: the model has no experts; set parallel.ep=1")
    else:
        message = f"<parallel.ep>: does not divide the model's {experts.count} experts; choose a divisor"
        check(experts.count % parallel.ep == 0, message)
        message = "<parallel.tp>: a model with experts also needs parallel.sequence_parallel=true; set it"
        check(parallel.tp == 1 or parallel.sequence_parallel, message)
    if not config.model.fp8:
        return
    # TransformerEngine multiplies FP8 matrices only where their sides are multiples of a block.
    model, tp = config.model, parallel.tp
    multiple = parallel_layout.FP8_MULTIPLE[model.fp8_recipe]
    sizes = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim // tp,
        "width of queries, keys and values": (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp,
        "feed-forward width": shape.ffn // tp,
        "width of an expert": shape.experts.ffn if shape.experts else multiple,
    }
    for what, size in sizes.items():
        message = f"<model.fp8>: the {what} on a rank, {size}, is no multiple of {multiple}; lower parallel.tp"
        check(size % multiple == 0, message)
    most = shape.layers // parallel.pp
    for setting in ("fp8_skip_first", "fp8_skip_last"):
        message = f"<model.{setting}>: a pipeline stage has {most} layers; choose at most {most}"
        check(getattr(model, setting) <= most, message)


def _check_fp8(config: Config) -> None:
    check = partial(require, config=config)
    model = config.model
    if not model.fp8:
        for setting in ("fp8_recipe", "fp8_params", "fp8_skip_first", "fp8_skip_last"):
            default = getattr(model, setting) == getattr(ModelConfig, setting)
            check(default, f"<model.{setting}>: needs model.fp8; set model.fp8=hybrid")
        return
    check(model.dtype == "bfloat16", f"<model.fp8>: needs model.dtype=bfloat16, not {model.dtype}; set model.fp8=null")
    # Megatron-Core would need a layout of its buffers that is not set up here.
    message = "<model.fp8_params>: with model.fp8_recipe=mxfp8 is not supported; set it to false, or another recipe"
    check(model.fp8_recipe != "mxfp8" or not model.fp8_params, message)
    message = "keeps no layers in bfloat16; choose model.fp8_recipe=tensorwise, or set model.fp8_skip_*=0"
    skips = model.fp8_skip_first + model.fp8_skip_last > 0
    check(model.fp8_recipe != "delayed" or not skips, f"<model.fp8_recipe>: {message}")
