"""Convert a checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint to start from.

    megatron-collab convert RUN OUT --model HF        # the newest checkpoint; or RUN@50, RUN@best (train.keep_best)
    megatron-collab convert RUN OUT --model HF --peft # the adapters of a run with model.lora.rank, as PEFT reads them
    megatron-collab convert HF OUT --to-megatron              # OUT: the `checkpoints` folder of a new run

One process, no GPU, the memory of one file: the whole model is never loaded, except by --verify.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_collab import patches
from megatron_collab.commands import ArgumentParser

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("convert", __doc__)
    parser.add_argument("source", type=Path, help="run (RUN, RUN@STEP, RUN@best), checkpoint, or Hugging Face folder")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--model", help="initial model of the run (folder or Hub name): config and tokenizer")
    parser.add_argument("--to-megatron", action="store_true", help="convert a Hugging Face folder to a checkpoint")
    parser.add_argument("--peft", action="store_true", help="write only the adapters; otherwise they are merged")
    parser.add_argument("--shard-size", type=_bytes, default=_bytes("5GB"), help="size of the largest file [5GB]")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="dtype of the result [that of the source]")
    parser.add_argument("--verify", action="store_true", help="compare log-probs of source and result")
    options = parser.parse_args(arguments)
    if options.to_megatron == (options.model is not None):
        parser.error("give --model HF to convert a checkpoint, or --to-megatron to convert a Hugging Face folder")
    if options.peft and options.to_megatron:
        parser.error("--peft writes the adapters of a checkpoint; remove --to-megatron")
    from megatron_collab.settings import WRITTEN_FOLDER, ConfigError, check_path

    check_path("OUT", options.out, WRITTEN_FOLDER)  # before imports that take seconds
    import torch

    patches.apply("megatron")
    from megatron_collab.checkpoint import convert, storage
    from megatron_collab.commands import verify
    from megatron_collab.runtime import hub

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about names that Megatron-Core uses
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.to_megatron:
        convert.to_checkpoint(options.source, options.out, dtype, options.shard_size)
        checkpoint, folder = storage.find_checkpoint(options.out), options.source
    else:
        checkpoint, folder = storage.find_checkpoint(options.source), options.out
        initial_model = hub.download(options.model, "--model") if hub.parse(options.model) else Path(options.model)
        adapters = "lora" in (storage.read_state(checkpoint) or {})
        if options.verify and (options.peft or adapters):
            raise ConfigError("--verify: adapters are always compared in full; remove it")
        if options.peft:
            convert.to_peft(checkpoint, folder, initial_model, options.model, dtype)
        else:
            convert.to_hf(checkpoint, folder, initial_model, dtype, options.shard_size)
    print(f"{options.out}: written from {checkpoint if folder is options.out else folder}")
    if not options.verify:
        return 0
    return verify.report(folder, checkpoint, dtype)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|KB|MB|GB)", text.upper())
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])
