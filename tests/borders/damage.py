"""Ways in which the folder of a model can be wrong; each changes the folder that it is given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3

Damage = Callable[[Path], object]


def tensors(**change: torch.Tensor | None) -> Damage:
    """The weights with other tensors; None: without."""

    def rewrite(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS) | {name.replace("__", "."): value for name, value in change.items()}
        save_file({name: value for name, value in weights.items() if value is not None}, folder / WEIGHTS)

    return rewrite


def cut(name: str, share: float) -> Damage:
    """Only this share of the file's bytes is left."""

    def shorten(folder: Path) -> None:
        file = folder / name
        os.truncate(file, int(file.stat().st_size * share))

    return shorten


def index(**places: str) -> Damage:
    """An index that names these files; the weights are in model-1.safetensors."""

    def write(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        files = dict.fromkeys(load_file(folder / "model-1.safetensors"), "model-1.safetensors")
        files |= {name.replace("__", "."): file for name, file in places.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))

    return write


def header(change: Callable[[dict], object]) -> Damage:
    """Weights with another header, as long as it was."""

    def rewrite(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        text = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return rewrite


def only_pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def described(**change: object) -> Damage:
    def rewrite(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))

    return rewrite


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def more_tokens(folder: Path, *, number: int = 301, **facts: object) -> None:
    """A token that the embedding has no row for; `facts`: of it."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    token = {**tokenizer["added_tokens"][0], "id": number, "content": "<|more|>", **facts}
    tokenizer["added_tokens"].append(token)
    file.write_text(json.dumps(tokenizer))


def more_words(folder: Path) -> None:
    """A word of the vocabulary itself that the embedding has no row for."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["more"] = 4000
    file.write_text(json.dumps(tokenizer))


def template(text: str) -> Damage:
    return written("chat_template.jinja", text)


BROKEN = "model.safetensors is truncated or corrupt ("
# what is done to a folder, and what is said of it
WRONG: dict[str, tuple[Damage, str]] = {
    "none": (lambda folder: (folder / WEIGHTS).unlink(), "model.safetensors is missing; give a complete folder"),
    "pickled": (only_pickled, "pytorch_model.bin, a pickle, is not read; save it again with transformers"),
    "empty": (cut(WEIGHTS, 0), BROKEN),
    "cut in the header": (cut(WEIGHTS, 0.002), BROKEN),
    "cut in the weights": (cut(WEIGHTS, 0.5), BROKEN),
    "a pointer": (
        written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors is a pointer of Git LFS, without the content",
    ),
    "a tensor less": (tensors(model__norm__weight=None), "model.norm.weight is missing"),
    "a tensor more": (tensors(model__more=torch.zeros(2)), "model.more is unexpected"),
    "another shape": (tensors(model__norm__weight=torch.zeros(3)), "has shape (3,), config.json asks for (64,)"),
    "int8": (tensors(model__norm__weight=torch.zeros(64, dtype=torch.int8)), "has dtype I8, and BF16, F16, F32, F64"),
    "fp8": (tensors(model__norm__weight=torch.zeros(64).to(torch.float8_e4m3fn)), "has dtype F8_E4M3, and BF16"),
    "offsets of nothing": (header(lambda entries: entries[NORM].update(data_offsets=[0, 8])), BROKEN),
    "no offsets": (header(lambda entries: entries[NORM].pop("data_offsets")), BROKEN),
    "no shape": (header(lambda entries: entries[NORM].update(shape=[-1])), BROKEN),
    "outside": (index(model__norm__weight="../../etc/passwd"), "names '../../etc/passwd', which is not a file in"),
    "absolute": (
        index(model__norm__weight="/etc/passwd"),
        "names '/etc/passwd', which is not a file in this folder",
    ),
    "a file less": (
        index(model__norm__weight="model-2.safetensors"),
        "model-2.safetensors is missing; give a complete",
    ),
    "a name more": (index(more="model-1.safetensors"), "says that model-1.safetensors holds more, but it does not"),
    "layers": (described(num_hidden_layers=10**9, layer_types=None), "num_hidden_layers=1000000000: no model has"),
    "a layer more": (
        described(num_hidden_layers=4, layer_types=None),
        "model.layers.3.input_layernorm.weight is missing",
    ),
    "another family": (
        described(model_type="llama"),
        "SGLang runs architectures=Qwen3ForCausalLM, the trainer LlamaForCausalLM; correct it",
    ),
    "another architecture": (
        described(architectures=["Qwen3ForSequenceClassification"]),
        "SGLang runs architectures=Qwen3ForSequenceClassification, the trainer Qwen3ForCausalLM; correct it",
    ),
    "another head": (
        described(tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens.weight; set it to false",
    ),
    "more tokens": (
        more_tokens,
        "gives '<|more|>' the id 301, but its embedding has 301 rows; give the tokenizer of this model",
    ),
    "tokenizer cut": (cut("tokenizer.json", 0.5), "its tokenizer cannot be read ("),
    "tokenizer of nothing": (written("tokenizer.json", "{}"), "its tokenizer cannot be read (KeyError"),
    "generation cut": (
        written("generation_config.json", "{"),
        "generation_config.json cannot be read as JSON (",
    ),
    "generation a list": (written("generation_config.json", "[]"), "generation_config.json does not describe a model"),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "no tokenizer.json there; save the tokenizer",
    ),
    "syntax": (template("{% for x in %}"), "its chat template fails (Expected an expression"),
    "raises": (template("{{ raise_exception('never') }}"), "its chat template fails (never)"),
    "into Python": (template("{{ ''.__class__.__mro__ }}"), "its chat template fails (access to attribute '__class__'"),
    "divides": (template("{{ 1 / 0 }}"), "its chat template fails (ZeroDivisionError"),
    "recursion": (
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        "its chat template fails (RecursionError",
    ),
    "endless": (template(ENDLESS), "does not finish within 1 s"),
    "a number": (template("{{ 3 ** (10 ** 9) }}"), "computes a value of more than 16777216 characters"),
    "memory": (template("{{ 'x' * 10 ** 11 }}"), "its chat template fails (computes a value of more than"),
}
