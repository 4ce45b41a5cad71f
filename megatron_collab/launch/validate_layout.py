"""Layouts and precisions that cannot work on this machine or with this model, refused in one line."""

from __future__ import annotations

from megatron_collab.config import Config, ModelConfig, ParallelConfig, require
from megatron_collab.models import parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device


def validate_layout(config: Config) -> None:
    """What can be said without the model and without this machine."""
    if config.model.fp8:
        _check_fp8(config.model)
    else:
        for setting in ("fp8_recipe", "fp8_params", "fp8_skip_first", "fp8_skip_last"):
            value, default = getattr(config.model, setting), getattr(ModelConfig, setting)
            require(value == default, f"model.{setting}={value}: needs model.fp8; set model.fp8=hybrid")
    _check_layout(config)


def check_machine(config: Config) -> None:
    """What TransformerEngine and the device of this machine must be able to do."""
    if config.parallel.cp > 1:
        _needs_engine(f"parallel.cp={config.parallel.cp}", "set parallel.cp=1")
    if config.model.fp8:
        _needs_engine(f"model.fp8={config.model.fp8}", "set model.fp8=null")
        _check_capability(config.model.fp8_recipe)


def check_shape(config: Config, shape: ModelShape) -> None:
    """The sizes of the model against the layout and FP8."""
    _check_cuts(config.parallel, shape)
    if config.model.fp8:
        _check_fp8_sizes(config, shape)


def _check_layout(config: Config) -> None:
    parallel, ranks = config.parallel, parallel_layout.ranks(config)
    size = parallel.tp * parallel.pp * parallel.cp
    require(
        ranks % size == 0,
        f"parallel.tp={parallel.tp} x parallel.pp={parallel.pp} x parallel.cp={parallel.cp} does not divide the "
        f"{ranks} ranks (launch.nodes={config.launch.nodes} x launch.nproc_per_node={config.launch.nproc_per_node}); "
        f"set launch.nproc_per_node so that they are a multiple of {size}",
    )
    require(
        not parallel.sequence_parallel or parallel.tp > 1,
        "parallel.sequence_parallel=true: needs parallel.tp > 1; set parallel.sequence_parallel=false",
    )
    require(
        parallel.vpp == 1 or parallel.pp > 1, f"parallel.vpp={parallel.vpp}: needs parallel.pp > 1; set parallel.vpp=1"
    )
    require(
        ranks // parallel.pp % parallel.ep == 0,
        f"parallel.ep={parallel.ep}: does not divide the {ranks // parallel.pp} ranks of a pipeline stage; "
        "choose a divisor",
    )
    _, multiple = parallel_layout.alignment(config)
    tokens = config.train.tokens_per_micro_batch
    require(
        tokens % multiple == 0,
        f"train.tokens_per_micro_batch={tokens}: must be a multiple of {multiple} with this layout and precision; "
        f"set {-(-tokens // multiple) * multiple}",
    )


def _needs_engine(setting: str, way_out: str) -> None:
    engine = device.probe("transformer_engine")
    require(engine.found, f"{setting}: needs TransformerEngine ({engine.detail}); {way_out}")


# recipe: first compute capability that TransformerEngine 2.20 runs it on, the first that it does not, and why
_FP8_DEVICES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "delayed": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "tensorwise": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "blockwise": ((9, 0), (100, 0), "scales by block came with Hopper"),
    "mxfp8": ((10, 0), (12, 0), "MXFP8 is a format of Blackwell's data centre devices, below 12.0"),
}


def _check_fp8(model: ModelConfig) -> None:
    require(
        model.dtype == "bfloat16",
        f"model.fp8={model.fp8}: needs model.dtype=bfloat16, not {model.dtype}; set model.fp8=null",
    )
    require(
        model.fp8_recipe != "mxfp8" or not model.fp8_params,
        "model.fp8_params=true: with model.fp8_recipe=mxfp8, Megatron-Core needs a layout of its buffers that is not "
        "set up here; set model.fp8_params=false, or choose another recipe",
    )
    skipped = model.fp8_skip_first + model.fp8_skip_last
    require(
        model.fp8_recipe != "delayed" or skipped == 0,
        "model.fp8_recipe=delayed: keeps no layers in bfloat16; choose model.fp8_recipe=tensorwise, or set "
        "model.fp8_skip_first=0 and model.fp8_skip_last=0",
    )


def _check_capability(recipe: str) -> None:
    first, end, reason = _FP8_DEVICES[recipe]
    found = device.capability()
    require(
        found is not None and first <= found < end,
        f"model.fp8_recipe={recipe}: needs a device of compute capability {first[0]}.{first[1]} or higher "
        f"({reason}), here is {'none' if found is None else f'one of {found[0]}.{found[1]}'}; "
        "choose another recipe, or set model.fp8=null",
    )


def _check_cuts(parallel: ParallelConfig, shape: ModelShape) -> None:
    tp, pp, vpp, ep, experts = parallel.tp, parallel.pp, parallel.vpp, parallel.ep, shape.experts
    sizes = {"attention heads": shape.heads, "key/value heads": shape.kv_heads, "feed-forward width": shape.ffn}
    for what, count in sizes.items():
        require(count % tp == 0, f"parallel.tp={tp}: does not divide the model's {count} {what}; choose a divisor")
    stages = f"parallel.pp={pp}" if vpp == 1 else f"parallel.pp={pp} x parallel.vpp={vpp}"
    require(
        pp * vpp <= shape.layers,
        f"{stages}: the model has only {shape.layers} layers; choose at most {shape.layers} stages",
    )
    require(ep == 1 or experts is not None, f"parallel.ep={ep}: the model has no experts; set parallel.ep=1")
    if experts is not None:
        require(
            experts.count % ep == 0,
            f"parallel.ep={ep}: does not divide the model's {experts.count} experts; choose a divisor",
        )
        require(
            tp == 1 or parallel.sequence_parallel,
            f"parallel.tp={tp}: a model with experts also needs parallel.sequence_parallel=true; set it",
        )


def _check_fp8_sizes(config: Config, shape: ModelShape) -> None:
    """TransformerEngine multiplies FP8 matrices only where their sides are multiples of a block."""
    model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
    multiple = parallel_layout.FP8_MULTIPLE[model.fp8_recipe]
    sizes = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim // tp,
        "width of queries, keys and values": (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp,
        "feed-forward width": shape.ffn // tp,
        "width of an expert": shape.experts.ffn if shape.experts else multiple,
    }
    for what, size in sizes.items():
        require(
            size % multiple == 0,
            f"model.fp8={model.fp8}: the {what} on a rank, {size}, is no multiple of {multiple}; lower parallel.tp, "
            "or set model.fp8=null",
        )
    for setting in ("fp8_skip_first", "fp8_skip_last"):
        value, most = getattr(model, setting), shape.layers // pp
        require(value <= most, f"model.{setting}={value}: a pipeline stage has {most} layers; choose at most {most}")
