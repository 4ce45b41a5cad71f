"""Damaged files: data, models, runs, recordings and studies, for every command that reads them."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bad_inputs.valid import CONVERSATION, OUT, PAIR, PLAYED, ROW, SPOKEN, Files, Input, copied, line
from megatron_collab.observability import transcripts

Edit = Callable[[Path], object]


def inputs(files: Files, bases: dict[str, Input]) -> Iterator[Input]:
    yield from _data(files.folder / "data", bases)
    for kind, source, edits, readers in (
        ("model", files.model, MODELS, READ_MODELS),
        ("run", files.run, RUNS, READ_RUNS),
        ("recording", files.recording, RECORDINGS, READ_RECORDINGS),
    ):
        for number, (name, edit) in enumerate(edits.items()):
            copy = copied(source, files.folder / f"{kind}s" / str(number))
            edit(copy)
            for base in dealt(READERS.get(f"{kind} {name}", readers), number, 3):
                yield _replaced(bases[base], f"{kind}: {name}, {base}", str(source), str(copy))
    folder = files.folder / "studies"
    folder.mkdir()
    for number, (name, content) in enumerate(STUDIES.items()):
        file = folder / f"{number}.yaml"
        file.write_bytes(content)
        yield Input(f"study: {name}", "reproduce", (str(file), "--out", f"{OUT}/study"))
    for number, (name, content) in enumerate(PROMPTS.items()):
        for base in dealt([*READ_PROMPTS], number, 3):
            needed, option = READ_PROMPTS[base]
            file = folder / f"{number}-{base}.j2"
            file.write_bytes(needed + content)
            arguments = (*bases[base].arguments, *(word.replace("PATH", str(file)) for word in option.split(" ")))
            yield Input(f"prompt: {name}, {base}", bases[base].command, arguments)


def dealt(readers: Sequence[str], number: int, count: int) -> list[str]:
    """The first of the readers, and others in turn: `count` of them."""
    remaining = [*readers[1:]]
    return [readers[0], *(remaining[(number + at) % len(remaining)] for at in range(min(count - 1, len(remaining))))]


def _replaced(base: Input, name: str, source: str, copy: str) -> Input:
    """The input with a copy in place of a file or folder."""
    arguments = tuple(copy if word == source else word.replace(f"={source}", f"={copy}") for word in base.arguments)
    if arguments == tuple(base.arguments):
        assert "experiment=train_8b" in arguments, name  # a plan, which needs no model but reads it
        arguments = (*arguments, f"model.path={copy}")
    return Input(name, base.command, arguments)


# --- Data ------------------------------------------------------------------------------------------------------------


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "hi"} for role in roles]


def task(**changed: Any) -> bytes:
    return line(ROW | changed)


def _parquet(**columns: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


GOOD = line(CONVERSATION | ROW)  # a row that every reader reads
# Files that no reader can read, by name with a suffix.
FILES: dict[str, tuple[str, bytes]] = {
    "empty": ("jsonl", b""),
    "blank": ("jsonl", b"\n\n \n"),
    "null": ("jsonl", b"null\n" + GOOD),
    "a later row null": ("jsonl", GOOD + b"null\n"),
    "a number": ("jsonl", b"3\n"),
    "a list": ("jsonl", b"[]\n"),
    "a whole array, cut": ("jsonl", b"[" + GOOD.strip() + b","),
    "cut": ("jsonl", GOOD + GOOD[:30]),
    "no JSON": ("jsonl", b"hello\n"),
    "HTML": ("jsonl", b"<!DOCTYPE html><html><body>404</body></html>\n"),
    "a pointer of LFS": ("jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
    "NUL bytes": ("jsonl", b"\x00" * 64),
    "a NUL byte in a row": ("jsonl", GOOD.replace(b"hello", b"h\x00i")),
    "3,000 deep": ("jsonl", b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}\n"),
    "latin-1": ("jsonl", GOOD.replace(b"hello", b"caf\xe9")),
    "UTF-16": ("jsonl", GOOD.decode().encode("utf-16")),
    "UTF-32": ("jsonl", GOOD.decode().encode("utf-32")),
    "gzip without its name": ("jsonl", gzip.compress(GOOD)),
    "gzip, cut": ("jsonl.gz", gzip.compress(GOOD * 50)[:60]),
    "gzip that is none": ("jsonl.gz", GOOD),
    "gzip with a wrong checksum": ("jsonl.gz", gzip.compress(GOOD)[:-8] + b"\x00" * 8),
    "zstd that is none": ("jsonl.zst", GOOD),
    "xz that is none": ("jsonl.xz", GOOD),
    "bz2 that is none": ("jsonl.bz2", GOOD),
    "parquet's first bytes": ("parquet", b"PAR1" + b"\x00" * 20),
    "parquet, cut": ("parquet", _parquet(prompt=["a"] * 100, answer=["b"] * 100)[:-30]),
    "parquet, an empty table": ("parquet", _parquet(prompt=[], answer=[])),
    "parquet of other columns": ("parquet", _parquet(colour=["red"], size=[3])),
    "arrow that is none": ("arrow", b"nonsense" * 10),
    "JSON that is none": ("json", b"nonsense" * 10),
    "JSON, cut": ("json", b"[" + GOOD.strip()),
    "JSON, a number": ("json", b"3"),
    "a spreadsheet": ("xlsx", b"PK\x03\x04" + bytes(range(256))),
    "PNG": ("jsonl", b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "a pickle": ("pkl", b"\x80\x04N."),
    "a program": ("py", b"rows = []\n"),
    "CSV with one column of nothing": ("csv", b"colour\nred\n"),
    "CSV with an open quote": ("csv", b'question,answer\n"a,b\n'),
    "CSV of another number of cells": ("csv", b"question,answer\na,b,c,d\n"),
    "CSV with a column twice": ("csv", b"question,question,answer\na,b,c\n"),
    "an unknown column": ("jsonl", line({"colour": "red"})),
    "no columns": ("jsonl", b"{}\n"),
    "numbers for messages": ("jsonl", line({"messages": 3})),
    "messages of numbers": ("jsonl", line({"messages": [1, 2]})),
    "messages of nothing": ("jsonl", line({"messages": []})),
    "a message without role": ("jsonl", line({"messages": [{"content": "hi"}]})),
    "an unknown role": ("jsonl", line({"messages": turns("robot", "assistant")})),
    "content a number": ("jsonl", line({"messages": [{"role": "user", "content": 3}, SPOKEN[1]]})),
    "content an object": ("jsonl", line({"messages": [{"role": "user", "content": {"a": 1}}, SPOKEN[1]]})),
    "a number of 5,000 digits": ("jsonl", b'{"messages": ' + b"9" * 5000 + b"}\n"),
    "half of a pair of surrogates": ("jsonl", b'{"messages": "\\ud800"}\n'),
    "a key twice": ("jsonl", b'{"messages": 1, "messages": 2}\n'),
    "two messages of the user in a row": ("jsonl", line({"messages": turns("user", "assistant", "user", "user")})),
    "a call without a name": ("jsonl", line({"messages": [SPOKEN[0], {"role": "assistant", "tool_calls": [{}]}]})),
    "a call whose arguments are cut": (
        "jsonl",
        line(
            {
                "messages": [
                    SPOKEN[0],
                    {
                        "role": "assistant",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": '}}],
                    },
                ]
            }
        ),
    ),
    "an image in the content": (
        "jsonl",
        line(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SPOKEN[1]]}
        ),
    ),
}
# Arguments of the valid inputs that read rows.
READ_DATA = (
    "train sft",
    "train rl",
    "evaluate",
    "build-dataset",
    "doctor data",
    "prepare-data",
    "users-from-logs",
    "score",
)
# Rows that one kind of reader cannot read.
ROWS: dict[str, tuple[Sequence[str], Mapping[str, bytes]]] = {
    "task": (
        ("train rl", "evaluate", "build-dataset"),
        {
            "no prompt": line({"goal": "g"}),
            "prompt a number": task(prompt=3),
            "prompt null": task(prompt=None),
            "prompt ends with the assistant": task(prompt=turns("user", "assistant")),
            "two users in a row": task(prompt=turns("user", "user")),
            "a system message in the middle": task(prompt=turns("user", "assistant", "system", "user")),
            "an unknown role": task(prompt=turns("robot")),
            "content null": task(prompt=[{"role": "user", "content": None}]),
            "a message without role": task(prompt=[{"content": "hi"}]),
            "goal a list": task(goal=[1]),
            "answer a dict": task(answer={"a": 1}),
            "metadata a string": task(metadata="x"),
            "metadata a list": task(metadata=[1]),
            "user a list": task(user=[3]),
            "replay of nothing": task(metadata={"replay": 3}),
            "replay without texts": task(metadata={"replay": [1]}),
            "id a list": task(id=[1]),
            "a longer prompt than the context": task(prompt=[{"role": "user", "content": "hi " * 20000}]),
            "conversations": line(CONVERSATION),
        },
    ),
    "conversation": (
        ("train sft", "prepare-data"),
        {
            "no assistant": line({"messages": turns("user")}),
            "weight of nothing": line({"messages": [SPOKEN[0], SPOKEN[1] | {"weight": "x"}]}),
            "weight 2": line({"messages": [SPOKEN[0], SPOKEN[1] | {"weight": 2}]}),
            "tools of numbers": line(CONVERSATION | {"tools": [3]}),
            "tools a text": line(CONVERSATION | {"tools": "calculator"}),
            "calls of numbers": line({"messages": [SPOKEN[0], {"role": "assistant", "tool_calls": 3}]}),
            "an answer of a tool that was not called": line({"messages": turns("user", "tool")}),
            "an image": line({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SPOKEN[1]]}),
        },
    ),
    "pair": (
        ("train dpo",),
        {
            "no rejected": line({"prompt": SPOKEN[:1], "chosen": SPOKEN[1:]}),
            "chosen null": line(PAIR | {"chosen": None}),
            "equal": line(PAIR | {"rejected": PAIR["chosen"]}),
            "chosen a number": line(PAIR | {"chosen": 3}),
            "rejected of the user": line(PAIR | {"rejected": SPOKEN[:1]}),
            "tasks": task(),
            "conversations": line(CONVERSATION),
        },
    ),
    "log": (
        ("users-from-logs", "realism"),
        {
            "no user": line({"messages": turns("assistant")}),
            "tasks": line({"prompt": "a", "answer": "b"}),
            "from an unknown speaker": line({"conversations": [{"from": "robot", "value": "x"}]}),
            "value a number": line({"conversations": [{"from": "human", "value": 3}]}),
            "one text": line({"messages": "hi"}),
        },
    ),
}


def _data(folder: Path, bases: dict[str, Input]) -> Iterator[Input]:
    folder.mkdir()
    for number, (name, (suffix, content)) in enumerate(FILES.items()):
        file = folder / f"{number}.{suffix}"
        file.write_bytes(content)
        for base in dealt(READ_DATA, number, 3):
            if base not in TOLERANT.get(name, ()):
                yield _of_data(bases[base], f"data: {name}, {base}", file)
    for kind, (readers, rows) in ROWS.items():
        for number, (name, content) in enumerate(rows.items()):
            file = folder / f"{kind}-{number}.jsonl"
            file.write_bytes(content)
            for base in readers:
                if base not in TOLERANT.get(name, ()):
                    yield _of_data(bases[base], f"{kind}: {name}, {base}", file)


# Readers that rightly read one of them.
TOLERANT: dict[str, Sequence[str]] = {  # the texts of users alone
    "a call without a name": ("users-from-logs",),
    "a call whose arguments are cut": ("users-from-logs",),
}


def _of_data(base: Input, name: str, file: Path) -> Input:
    """The input with this file as its data."""
    if base.command == "score":
        return Input(name, base.command, (*base.arguments, f"data.train={file}"))
    old = next(word for word in base.arguments if word.endswith(".jsonl") and "OUTPUT" not in word).rpartition("=")[2]
    return _replaced(base, name, old, str(file))


# --- Models ----------------------------------------------------------------------------------------------------------


def setting(**changed: Any) -> Edit:
    """Change settings of config.json; None removes one."""

    def edit(model: Path) -> None:
        file = model / "config.json"
        config = json.loads(file.read_text()) | changed
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return edit


def template(text: str) -> Edit:
    return lambda model: (model / "chat_template.jinja").write_text(text)


def header(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change the header of model.safetensors, which has 8 bytes of length, the header in JSON, the tensors."""

    def edit(model: Path) -> None:
        file = model / "model.safetensors"
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        tensors = json.loads(content[8 : 8 + size])
        change(tensors)
        new = json.dumps(tensors).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])

    return edit


def index(file: str) -> Edit:
    def edit(model: Path) -> None:
        names = {"model.embed_tokens.weight": file}
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return edit


def cut(name: str, share: float) -> Edit:
    def edit(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return edit


def written(name: str, content: bytes) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return edit


def removed(name: str) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / name
        shutil.rmtree(file) if file.is_dir() else file.unlink()

    return edit


def folder_at(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return edit


def linked(name: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return edit


EMBEDDING = "model.embed_tokens.weight"
READ_MODELS = ("train rl", "evaluate", "to checkpoint")
MODELS: dict[str, Edit] = {
    "no config.json": removed("config.json"),
    "config.json cut": cut("config.json", 0.5),
    "config.json empty": written("config.json", b""),
    "config.json a list": written("config.json", b"[]"),
    "config.json null": written("config.json", b"null"),
    "config.json binary": written("config.json", bytes(range(256))),
    "config.json UTF-16": written("config.json", "{}".encode("utf-16")),
    "config.json 3,000 deep": written("config.json", b"[" * 3000 + b"]" * 3000),
    "config.json 100,000 deep": written("config.json", b'{"a": ' + b"[" * 100_000),
    "config.json 200 deep": written("config.json", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}"),
    "config.json a folder": folder_at("config.json"),
    "config.json a loop": linked("config.json", "config.json"),
    "config.json a device": linked("config.json", "/dev/zero"),
    "10^9 layers": setting(num_hidden_layers=10**9),
    "no layers": setting(num_hidden_layers=0),
    "layers a text": setting(num_hidden_layers="3"),
    "a layer more": setting(num_hidden_layers=9, layer_types=None),
    "hidden size a text": setting(hidden_size="64"),
    "hidden size a fraction": setting(hidden_size=64.5),
    "hidden size of another": setting(hidden_size=4096),
    "heads that do not divide": setting(num_attention_heads=7),
    "no heads": setting(num_attention_heads=0),
    "negative heads": setting(num_key_value_heads=-2),
    "vocabulary of another": setting(vocab_size=10**6),
    "vocabulary null": setting(vocab_size=None),
    "an unknown family": setting(model_type="rwkv"),
    "family a number": setting(model_type=3),
    "another family": setting(model_type="llama"),
    "another architecture": setting(architectures=["BertModel"]),
    "architectures a text": setting(architectures="Qwen3ForCausalLM"),
    "no positions": setting(max_position_embeddings=0),
    "an unknown rope": setting(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
    "rope a number": setting(rope_parameters=3),
    "quantized": setting(quantization_config={"quant_method": "awq", "bits": 4}),
    "norm_eps a text": setting(rms_norm_eps="x"),
    "no weights": removed("model.safetensors"),
    "weights cut": cut("model.safetensors", 0.5),
    "weights empty": written("model.safetensors", b""),
    "weights nonsense": written("model.safetensors", b"nonsense" * 100),
    "weights a folder": folder_at("model.safetensors"),
    "weights a loop": linked("model.safetensors", "model.safetensors"),
    "weights a pointer": written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
    "a header of 2^60 bytes": written("model.safetensors", (1 << 60).to_bytes(8, "little")),
    "a header that is a list": written("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    "a tensor missing": header(lambda tensors: tensors.pop(EMBEDDING)),
    "a tensor of another shape": header(lambda tensors: tensors[EMBEDDING].update(shape=[1, 1])),
    "a tensor of integers": header(lambda tensors: tensors[EMBEDDING].update(dtype="I32")),
    "a tensor of an unknown dtype": header(lambda tensors: tensors[EMBEDDING].update(dtype="Z9")),
    "a tensor beyond the file": header(lambda tensors: tensors[EMBEDDING].update(data_offsets=[0, 1 << 40])),
    "an index to ../../etc/passwd": index("../../../../etc/passwd"),
    "an index to /etc/passwd": index("/etc/passwd"),
    "an index to a file that is not there": index("none.safetensors"),
    "an index of numbers": written("model.safetensors.index.json", b'{"weight_map": 3}'),
    "an index cut": written("model.safetensors.index.json", b'{"weight_map": {'),
    "no tokenizer": removed("tokenizer.json"),
    "tokenizer.json cut": cut("tokenizer.json", 0.5),
    "tokenizer.json {}": written("tokenizer.json", b"{}"),
    "tokenizer.json a folder": folder_at("tokenizer.json"),
    "tokenizer_config.json []": written("tokenizer_config.json", b"[]"),
    "tokenizer_config.json cut": cut("tokenizer_config.json", 0.5),
    "a template with a fault": template("{% if %}"),
    "a template that raises": template("{{ raise_exception('no') }}"),
    "a template without an end": template("{% for i in range(10**12) %}{% endfor %}"),
    "a template of an unknown filter": template("{{ messages | nonsense }}"),
    "a template of Python": template("{{ ''.__class__.__mro__ }}"),
    "an empty template": template(""),
    "generation_config.json cut": written("generation_config.json", b"{"),
    "generation_config.json a list": written("generation_config.json", b"[]"),
}
# Readers of only some of the files: a conversion needs no tokenizer, a plan nothing but config.json.
_CONFIG = (*READ_MODELS, "doctor plan", "plan-sync", "rehearse", "convert")
READERS: dict[str, Sequence[str]] = {}


# --- Runs ------------------------------------------------------------------------------------------------------------


def instead(content: bytes) -> Edit:
    """A file in place of the folder."""

    def edit(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.write_bytes(content)

    return edit


def played(**changed: Any) -> Edit:
    """A recorded future with other values; None removes one."""
    row = {name: value for name, value in (PLAYED | changed).items() if value is not None}

    def edit(run: Path) -> None:
        transcripts.write_step(run, 0, [[row]])

    return edit


def old_transcripts(content: bytes) -> Edit:
    """The transcripts of an earlier version."""

    def edit(run: Path) -> None:
        shutil.rmtree(run / "transcripts")
        (run / "transcripts.jsonl").write_bytes(content)

    return edit


def other_table(run: Path) -> None:
    pq.write_table(pa.table({"loss": [1.0]}), run / TRANSCRIPT)


def other_content(content: str) -> Edit:
    """Groups that have this in place of their futures."""

    def edit(run: Path) -> None:
        table = pq.read_table(run / TRANSCRIPT)
        contents = pa.array([content] * len(table), pa.string())
        place = table.schema.get_field_index("content")
        pq.write_table(table.set_column(place, "content", contents), run / TRANSCRIPT)

    return edit


def state(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(run: Path) -> None:
        file = run / STATE
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


STATE = "checkpoints/step_0/state.json"
TRANSCRIPT = "transcripts/step_000000.parquet"
READ_RUNS = ("score", "realism")
_READ_CHECKPOINTS = ("convert", "evaluate run")


def each_weight_file(change: Callable[[Path], object]) -> Edit:
    def edit(run: Path) -> None:
        for file in (run / "checkpoints/step_0").glob("*.distcp"):
            change(file)

    return edit


RUNS: dict[str, Edit] = {
    "a file": instead(b"x"),
    "config.json missing": removed("config.json"),
    "config.json torn": cut("config.json", 0.5),
    "config.json empty": written("config.json", b""),
    "config.json a list": written("config.json", b"[]"),
    "config.json a text": written("config.json", b'"x"'),
    "config.json binary": written("config.json", bytes(range(256))),
    "config.json 3,000 deep": written("config.json", b"[" * 3000 + b"]" * 3000),
    "config.json a folder": folder_at("config.json"),
    "config.json a loop": linked("config.json", "config.json"),
    "config.json of numbers": written("config.json", b'{"train": 3, "reward": 4, "data": 5}'),
    "config.json of another type": written("config.json", b'{"reward": {"weights": [1]}, "train": {"stage": "rl"}}'),
    "config.json of an unknown stage": written("config.json", b'{"train": {"stage": 3}}'),
    "transcripts missing": removed("transcripts"),
    "transcripts empty": written(TRANSCRIPT, b""),
    "transcripts binary": written(TRANSCRIPT, bytes(range(256))),
    "transcripts cut": cut(TRANSCRIPT, 0.9),
    "transcripts without their beginning": lambda run: (run / TRANSCRIPT).write_bytes(
        bytes(400) + (run / TRANSCRIPT).read_bytes()[400:]
    ),
    "transcripts a folder": folder_at(TRANSCRIPT),
    "transcripts of another table": other_table,
    "transcripts of numbers": other_content("3"),
    "transcripts of a list of numbers": other_content("[3]"),
    "transcripts without JSON": other_content("{"),
    "transcripts 3,000 deep": other_content("[" * 3000 + "]" * 3000),
    "old transcripts empty": old_transcripts(b""),
    "old transcripts binary": old_transcripts(bytes(range(256))),
    "old transcripts of numbers": old_transcripts(b"3\n4\n"),
    "old transcripts of metrics": old_transcripts(line({"step": 0, "loss": 1.0})),
    "old transcripts without future": old_transcripts(line(PLAYED | {"future": "x"})),
    "no future": played(future=None),
    "no messages": played(messages=None),
    "messages a number": played(messages=3),
    "messages of numbers": played(messages=[1, 2]),
    "a message without role": played(messages=[SPOKEN[0], {"content": "x"}]),
    "another task": played(task="none"),
    "task a list": played(task=[1]),
    "scores a list": played(scores=[1]),
    "a score a text": played(scores={"token_amount": "x"}),
    "a reward a text": played(reward="x"),
    "no reward": played(reward=None),
    "an unknown ending": played(ending="bored"),
    "rollout a text": played(rollout="x"),
    "cut a number": played(cut=3),
    "turns of numbers": played(turns=3),
    "no checkpoints": removed("checkpoints"),
    "checkpoints a file": lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").write_text("x")),
    "no state": removed(STATE),
    "state cut": cut(STATE, 0.5),
    "state a list": written(STATE, b"[]"),
    "state {}": written(STATE, b"{}"),
    "state binary": written(STATE, bytes(range(256))),
    "state a folder": folder_at(STATE),
    "state of another model": state(
        lambda saved: (
            saved["state"].update(model={"hidden": 3}) if "model" in saved["state"] else saved.update(step="x")
        )
    ),
    "state of other files": state(lambda saved: saved.update(files={"none": [1, 1]})),
    "files a number": state(lambda saved: saved.update(files=3)),
    "metadata missing": removed("checkpoints/step_0/.metadata"),
    "metadata cut": cut("checkpoints/step_0/.metadata", 0.5),
    "weights cut": each_weight_file(lambda file: cut(file.name, 0.5)(file.parent)),
    "weights missing": each_weight_file(Path.unlink),
}
for _name in RUNS:
    if any(part in _name for part in ("checkpoints", "state", "files", "metadata", "weights")):
        READERS[f"run {_name}"] = _READ_CHECKPOINTS
_OF_CONFIG = ("config.json", "10^9", "no layers", "layers a", "hidden size a", "heads", "no heads", "negative")
_NOT_CONVERTED = ("no tokenizer", "tokenizer", "a template", "an empty template", "generation_config")
READERS |= {f"model {name}": _CONFIG for name in MODELS if name.startswith(_OF_CONFIG)}
READERS |= {f"model {name}": READ_MODELS[:2] for name in MODELS if name.startswith(_NOT_CONVERTED)}


# --- Recordings, studies, prompts ------------------------------------------------------------------------------------


def shard(content: bytes) -> Edit:
    def edit(folder: Path) -> None:
        for file in folder.glob("*.calls"):
            file.write_bytes(content)

    return edit


READ_RECORDINGS = ("recording", "scrub")
RECORDINGS: dict[str, Edit] = {
    "a file": instead(b"x"),
    "no shard": lambda folder: [file.rename(folder / "x.txt") for file in folder.glob("*.calls")],
    "a shard that is none": shard(b"nonsense\n" * 40),
    "a shard of JSON": shard(b'{"a": 1}\n'),
    "a shard of a list": shard(b"[]\n"),
    "a shard of another format": shard(b'{"format": 99, "run": "x"}\n'),
    "a shard 3,000 deep": shard(b"[" * 3000 + b"]" * 3000 + b"\n"),
    "binary": shard(b"\xff\x00\n" * 100),
}
_LLM = "user.name=llm user.model=openai/gpt-4o llm.prices={openai/gpt-4o:[1,1]}"
READ_PROMPTS = {
    "train rl": (b"", "rollout.system_prompt=PATH"),
    "evaluate": (b"", "rollout.system_prompt=PATH"),
    "users-from-logs": (b"{{ conversation }}", "--prompt PATH"),
    "prepare-data": (b"", "--system-prompt PATH"),
    "build-dataset": (b"", "build.prompt=PATH build.proactive=0.5"),
    "train": (b"", f"user.prompt=PATH {_LLM}"),
}
PROMPTS = {  # after the variable that the reader needs, if any
    "a fault": b"{% if %}",
    "an open brace": b"{{ x",
    "not UTF-8": b"caf\xe9",
    "an unknown variable": b"{{ nonsense }}",
    "an unknown filter": b"{{ 'x' | nonsense }}",
    "Python": b"{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "without an end": b"{% for a in range(99999) %}" * 3 + b"{% endfor %}" * 3,
    "memory": b"{{ 'x' * 10 ** 11 }}",
    "a file of others": b"{% include '/etc/passwd' %}",
    "a division": b"{{ 1 / 0 }}",
}
STUDIES = {
    "empty": b"",
    "a list": b"[]",
    "a text": b"hello",
    "binary": bytes(range(256)),
    "not UTF-8": b"title: caf\xe9",
    "no YAML": b"a: [b",
    "Python in it": b"a: !!python/object/apply:os.system [ls]",
    "no arms": b"title: t\nmodel: m\ntasks: {}\n",
    "arms a list": b"title: t\nmodel: m\ntasks: {}\narms: [a]\n",
    "tasks a number": b"title: t\nmodel: m\ntasks: 3\narms: {}\n",
    "an unknown key": b"title: t\nmodel: m\ntasks: {}\narms: {}\nnonsense: 3\n",
    "nothing to do": b"title: t\nmodel: m\ntasks: {}\narms: {}\n",
    "a task without columns": b"title: t\nmodel: m\ntasks: {a: {title: t, source: s}}\narms: {}\n",
    "columns a number": b"title: t\nmodel: m\ntasks: {a: {title: t, source: s, columns: 3}}\narms: {}\n",
    "an arm from nothing": b"title: t\nmodel: m\ntasks: {}\narms: {a: {title: t, from: z}}\n",
    "an arm from itself": b"title: t\nmodel: m\ntasks: {}\narms: {a: {title: t, from: a}}\n",
    "an arm that is null": b"title: t\nmodel: m\ntasks: {}\narms: {a: null}\n",
    "500 deep": b"[" * 500 + b"]" * 500,
    "100,000 deep": b"a: " + b"[" * 100_000,
    "aliases that multiply": b"a: &a [[], []]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n, n, b"*%c," % (n - 1) * 9) for n in b"bcdefghijk"),
    "an alias of itself": b"title: t\nmodel: m\ntasks: &a {a: *a}\narms: {}\n",
    "settings of nothing": (
        b"title: t\nmodel: m\nsettings: 3\ntasks: {a: {title: t, source: s, columns: []}}\narms: {b: {title: t}}\n"
    ),
}
