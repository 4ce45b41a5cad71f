"""Checks of the parallel layout and the precision: of the settings alone, on this machine, and of a model."""

from __future__ import annotations

from operator import attrgetter

from megatron_collab.config import Config
from megatron_collab.models import lora, parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device
from megatron_collab.settings import Shown, TrainingModelConfig, require

# recipe: compute capability from which TransformerEngine 2.20 supports it, the first without support, and the reason
_FP8_DEVICES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "delayed": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "tensorwise": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "blockwise": ((9, 0), (100, 0), "block scaling came with Hopper"),
    "mxfp8": ((10, 0), (12, 0), "only Blackwell's data center GPUs, below 12.0, have MXFP8"),
}


def check_layout(config: Config) -> None:
    """Checks of the layout that need neither the model nor this machine. Raises ConfigError."""
    shown = Shown(config)
    parallel, ranks = config.parallel, config.launch.ranks
    size = parallel.tp * parallel.pp * parallel.cp
    require(
        ranks % size == 0,
        f"{shown.parallel.tp} x {shown.parallel.pp} x {shown.parallel.cp} does not divide the {ranks} ranks "
        f"({shown.launch.nodes} x {shown.launch.nproc_per_node}); set launch.nproc_per_node so that they are a "
        f"multiple of {size}",
    )
    message = f"{shown.parallel.sequence_parallel}: needs parallel.tp > 1; set it to false"
    require(parallel.tp > 1 or not parallel.sequence_parallel, message)
    require(parallel.pp > 1 or parallel.vpp == 1, f"{shown.parallel.vpp}: needs parallel.pp > 1; set parallel.vpp=1")
    stage = ranks // parallel.pp
    message = f"{shown.parallel.ep}: does not divide the {stage} ranks of a pipeline stage; choose a divisor"
    require(stage % parallel.ep == 0, message)
    _, multiple = parallel_layout.alignment(parallel, config.model)
    tokens = config.train.tokens_per_micro_batch
    fitting = -(-tokens // multiple) * multiple
    message = f"must be a multiple of {multiple} with this layout and precision; set {fitting}"
    require(tokens % multiple == 0, f"{shown.train.tokens_per_micro_batch}: {message}")
    model = config.model
    message = f"{shown.parallel.cp}: needs model.dtype=bfloat16, not {model.dtype}; set parallel.cp=1"
    require(parallel.cp == 1 or model.dtype == "bfloat16", message)
    targets = model.lora.targets
    require(bool(targets), "model.lora.targets=[]: nothing would be trained; name a layer, or set model.lora.rank=null")
    repeated = next((name for name in targets if targets.count(name) > 1), "")
    require(not repeated, f"model.lora.targets: {repeated} is named twice; name it once")
    message = f"{shown.model.lora.serve}: there are no adapters; set model.lora.rank, or model.lora.serve=merged"
    require(model.lora.serve == "merged" or model.lora.rank is not None, message)
    _check_fp8(config)


def _check_fp8(config: Config) -> None:
    shown, model = Shown(config), config.model
    if not model.fp8:
        for setting in ("fp8_recipe", "fp8_params", "fp8_skip_first", "fp8_skip_last"):
            default = getattr(model, setting) == getattr(TrainingModelConfig, setting)
            require(default, f"{getattr(shown.model, setting)}: needs model.fp8; set model.fp8=hybrid")
        return
    message = f"{shown.model.fp8}: needs model.dtype=bfloat16, not {model.dtype}; set model.fp8=null"
    require(model.dtype == "bfloat16", message)
    # Megatron-Core would need another layout of its buffers, which this trainer does not set up.
    message = f"{shown.model.fp8_params}: with model.fp8_recipe=mxfp8 is not supported"
    require(model.fp8_recipe != "mxfp8" or not model.fp8_params, f"{message}; set it to false, or another recipe")
    # TransformerEngine scales such parameters in the optimizer's step, which the reference does not have. With a scale
    # of 1 its weights would lose most of their digits.
    message = f"{shown.model.fp8_params}: with model.fp8_recipe=delayed"
    scaled = model.fp8_recipe != "delayed" or config.reference is None
    out = "choose model.fp8_recipe=blockwise, or set model.fp8_params=false"
    reason = "the reference, the first policy, is never scaled"
    require(scaled or not model.fp8_params, f"{message} {reason}; {out}")
    scaled = model.fp8_recipe != "delayed" or model.lora.rank is None
    reason = f"the weights that {shown.model.lora.rank} freezes are never scaled"
    require(scaled or not model.fp8_params, f"{message} {reason}; {out}")
    message = "keeps no layers in bfloat16; choose model.fp8_recipe=tensorwise, or set model.fp8_skip_*=0"
    skips = model.fp8_skip_first + model.fp8_skip_last > 0
    require(model.fp8_recipe != "delayed" or not skips, f"{shown.model.fp8_recipe}: {message}")


def check_layout_on_machine(config: Config) -> None:
    """Checks that TransformerEngine and the device of this machine support the settings. Raises ConfigError."""
    shown = Shown(config)
    for setting, used, off in (("parallel.cp", config.parallel.cp > 1, "1"), ("model.fp8", config.model.fp8, "null")):
        if used:
            engine = device.probe("transformer_engine")
            message = f"{attrgetter(setting)(shown)}: needs TransformerEngine ({engine.detail}); set {setting}={off}"
            require(engine.available, message)
    if config.model.dtype == "bfloat16" and device.select(config.launch.device).type == device.GPU:
        # The plan counts the layers of TransformerEngine; Megatron's local ones keep larger activations.
        engine = device.probe("transformer_engine")
        message = f"on GPUs needs TransformerEngine ({engine.detail}); run make setup GPU=1, or set model.dtype=float32"
        require(engine.available, f"{shown.model.dtype}: {message}")
    if config.model.fp8:
        (first, end, reason), capability = _FP8_DEVICES[config.model.fp8_recipe], device.capability()
        present = "{}.{}".format(*capability) if capability else "none"
        require(
            capability is not None and first <= capability < end,
            f"{shown.model.fp8_recipe}: needs a device of compute capability {first[0]}.{first[1]} or higher "
            f"({reason}), found {present}; choose another recipe, or set model.fp8=null",
        )


def check_layout_of_model(config: Config, shape: ModelShape) -> None:
    """Checks the sizes of the model against the layout and FP8. Raises ConfigError."""
    shown = Shown(config)
    parallel, experts = config.parallel, shape.experts
    sizes = {"attention heads": shape.heads, "key/value heads": shape.kv_heads, "feed-forward width": shape.ffn}
    for name, count in sizes.items():
        require(
            count % parallel.tp == 0,
            f"{shown.parallel.tp}: does not divide the model's {count} {name}; choose a divisor",
        )
    stages = f"{shown.parallel.pp} x {shown.parallel.vpp}" if parallel.vpp > 1 else f"{shown.parallel.pp}"
    message = f"{stages}: the model has only {shape.layers} layers; choose at most {shape.layers} stages"
    require(parallel.pp * parallel.vpp <= shape.layers, message)
    if experts is None:
        require(parallel.ep == 1, f"{shown.parallel.ep}: the model has no experts; set parallel.ep=1")
    else:
        message = f"{shown.parallel.ep}: does not divide the model's {experts.count} experts; choose a divisor"
        require(experts.count % parallel.ep == 0, message)
        message = f"{shown.parallel.tp}: a model with experts also needs parallel.sequence_parallel=true; set it"
        require(parallel.tp == 1 or parallel.sequence_parallel, message)
    bare = lora.without_adapters(shape, config.model.lora) if config.model.lora.rank else None
    message = f"layer {bare} would have no adapters, since experts get none; add o_proj"
    require(bare is None, f"model.lora.targets={config.model.lora.targets}: {message}")
    if not config.model.fp8:
        return
    # TransformerEngine reads the scales of grouped experts before Megatron-Core has assembled them.
    message = "the experts' scales of model.fp8_recipe=delayed cannot be read from a checkpoint; choose tensorwise"
    unread = experts and config.model.fp8_params and config.model.fp8_recipe == "delayed"
    require(not unread, f"{shown.model.fp8_params}: {message}")
    # TransformerEngine multiplies FP8 matrices only if their sides are multiples of a block.
    model, tp = config.model, parallel.tp
    multiple = parallel_layout.FP8_MULTIPLE[model.fp8_recipe]
    sizes = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim // tp,
        "width of queries, keys and values": (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp,
        "feed-forward width": shape.ffn // tp,
        "width of an expert": shape.experts.ffn if shape.experts else multiple,
    }
    for name, size in sizes.items():
        message = f"{shown.model.fp8}: the {name} on a rank, {size}, is not a multiple of {multiple}; lower parallel.tp"
        require(size % multiple == 0, message)
    most = shape.layers // parallel.pp
    for setting in ("fp8_skip_first", "fp8_skip_last"):
        message = f"{getattr(shown.model, setting)}: a pipeline stage has {most} layers; choose at most {most}"
        require(getattr(model, setting) <= most, message)
