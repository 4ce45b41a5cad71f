"""How a run ends if its input cannot work: options, data, models and run folders, wrong in every way we know.

`python tools/bench/bad_input.py`: for each option of the schema values below and above what it may be, nan, inf, of
another type, and unknown choices; then damaged files of data, of a model and of a run. Each input goes through the
whole start of a run, up to the moment when ranks would be started, and must end it with exit code 2 and one line.

    inputs = how many;
    traceback = inputs that ended with a traceback or another exit code;
    accepted_nonsense = inputs with which ranks would have been started;
    over_two_lines = inputs that printed more than two lines;
    crash = inputs that ended the interpreter or took longer than 20 s, twice, since the machine may be busy;
    seconds = of the slowest input.

--show prints what each of them printed; --smoke: every 25th. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 20.0  # seconds
IMPORTS = 300.0  # seconds that the first input of a process may take
Edit = Callable[[Path], object]


class Input(NamedTuple):
    name: str
    program: str
    arguments: list[str]


class Outcome(NamedTuple):
    """How a program ended: `code` is its exit code, "accepted", "traceback" or "crash"."""

    code: int | str
    output: str
    seconds: float


# --- Inputs --------------------------------------------------------------------------------------------------------


def option_inputs(base: Sequence[str]) -> Iterator[Input]:
    from megatron_collab.config import Config, declared

    for name, default, rule in declared(Config):
        values: list[str] = []
        number = isinstance(default, int | float) and not isinstance(default, bool)
        if number or rule.ge is not None or rule.gt is not None:
            low = next((bound for bound in (rule.gt, rule.ge) if bound is not None), None)
            high = next((bound for bound in (rule.lt, rule.le) if bound is not None), None)
            values += [] if low is None else [f"{low - (rule.gt is None)}"]
            values += [] if high is None else [f"{high + (rule.lt is None)}"]
            values += ["nan", "inf", "1e400", "many", "[1]", "9" * 30]
        elif isinstance(default, bool):
            values += ["maybe", "2", "[true]"]
        elif isinstance(default, list | dict):
            values += ["3", "[[[", "nonsense"]
        if isinstance(default, dict):
            values = [f"{{a: {value}}}" for value in values] if number else values
        if rule.choices and not isinstance(default, list):
            values += ["nonsense", "no.such:Class" if rule.extensible else "1"]
        for value in values:
            yield Input(f"{name}={value}", "train", [*base, f"{name}={value}"])
    for text in SYNTAX:
        yield Input(text, "train", [*base, *text.split(" ")])


SYNTAX = [
    *(
        "~optim.lr",
        "~optim",
        "optim.lr=1e-3,1e-4",
        "train.steps=range(1,3)",
        "experiment=booking,gsm8k",
        "-m",
        "--hepl",
    ),
    *("--multirun", "+foo.bar=1", "++optim.lerning_rate=5", "foo.bar=1", "optim.lr", "optim.lr=", "optim=3", "=3"),
    *(
        "optim.lr=${nothing}",
        "run.dir=${run.dir}",
        "hydra.run.dir=/x",
        "hydra/launcher=basic",
        "experiment@foo=booking",
    ),
    *("run.dir=", "data.train=[[]]", "data.train=3", "data.train={}", "data.eval=[{source: a, name: b, nmae: c}]"),
    *("model.path=", "model.path=/", "model.path=/dev/null", "data.train=/dev/null", "run.dir=/dev/null/x"),
    *("run.dir=/proc/x", "rollout.tools=[no.such:tool]", "user.name=nobody", "user.name=no.such:Class"),
    *("reward.weights.nonsense=1", "reward.metrics.nonsense.a=1", "users={a: {class: nobody}}"),
    *("servers={a: {model: /none}}", "rollout.server.args={port: 3}", "rollout.server.args={no-such-argument: 3}"),
    *("launch.interface=none0", "launch.nodes=2", "parallel.tp=3", "parallel.pp=7", "rollout.context_length=1000000"),
    *("rollout.turn.max_new_tokens=100000", "rollout.workers=10000", "launch.nproc_per_node=1000", "algo=nonsense"),
    *("data.format=no.such:Reader", "rollout.system_prompt=/none.j2", "user.prompt=/none.j2", "user.personas=/none"),
]

ROW: dict[str, Any] = {"id": "0", "prompt": [{"role": "user", "content": "hi"}], "goal": "g", "answer": "a"}
ROW |= {"metadata": {"replay": ["thanks"]}}


def line(**changed: Any) -> bytes:
    return json.dumps(ROW | changed).encode() + b"\n"


def turns(*roles: str) -> bytes:
    return line(prompt=[{"role": role, "content": "hi"} for role in roles])


GOOD = line()
DATA: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n \n",
    "first row null": b"null\n" + GOOD,
    "later row null": GOOD + b"null\n",
    "a number": b"3\n",
    "a list": b"[]\n",
    "a whole array of rows, cut": b"[" + GOOD.strip() + b",",
    "cut": GOOD + GOOD[:30],
    "no JSON": b"hello\n",
    "NUL bytes": b"\x00" * 64,
    "a NUL byte in a row": GOOD.replace(b"hi", b"h\x00i"),
    "3,000 deep": b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
    "latin-1": GOOD.replace(b"hi", b"caf\xe9"),
    "UTF-16": GOOD.decode().encode("utf-16"),
    "gzip": gzip.compress(GOOD),
    "parquet's first bytes": b"PAR1" + b"\x00" * 20,
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "no prompt": json.dumps({"goal": "g"}).encode(),
    "prompt a number": line(prompt=3),
    "prompt null": line(prompt=None),
    "prompt ends with the assistant": turns("user", "assistant"),
    "two users in a row": turns("user", "user"),
    "a system message in the middle": turns("user", "assistant", "system", "user"),
    "an unknown role": turns("robot"),
    "content a number": line(prompt=[{"role": "user", "content": 3}]),
    "content null": line(prompt=[{"role": "user", "content": None}]),
    "a message without role": line(prompt=[{"content": "hi"}]),
    "goal a list": line(goal=[1]),
    "answer a dict": line(answer={"a": 1}),
    "metadata a string": line(metadata="x"),
    "user a number": line(user=3),
    "columns of nothing we know": json.dumps({"colour": "red"}).encode(),
    "a longer prompt than the context": line(prompt=[{"role": "user", "content": "hi " * 20000}]),
}


def data_inputs(base: Sequence[str], folder: Path) -> Iterator[Input]:
    folder.mkdir()
    for number, (name, content) in enumerate(DATA.items()):
        file = folder / f"{number}.jsonl"
        file.write_bytes(content)
        yield Input(f"data: {name}", "train", [*base, f"data.train={file}"])
    for name in ("rows.parquet", "rows.json", "rows.jsonl.gz", "rows.arrow", "rows.xlsx"):
        (folder / name).write_bytes(b"nonsense" * 10)
        yield Input(f"data: nonsense in {name}", "train", [*base, f"data.train={folder / name}"])
    (folder / "none").mkdir()
    yield Input("data: a folder without files", "train", [*base, f"data.train={folder}/none"])


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
        written = json.dumps(tensors).encode()
        file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])

    return edit


def index(file: str) -> Edit:
    def edit(model: Path) -> None:
        names = {"model.embed_tokens.weight": file}
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return edit


def cut(name: str, kept: float) -> Edit:
    def edit(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * kept)])

    return edit


def written(name: str, content: bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content)


def removed(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


EMBEDDING = "model.embed_tokens.weight"
MODELS: dict[str, Edit] = {
    "no config.json": removed("config.json"),
    "config.json cut": cut("config.json", 0.5),
    "config.json a list": written("config.json", b"[]"),
    "config.json binary": written("config.json", bytes(range(256))),
    "10^9 layers": setting(num_hidden_layers=10**9),
    "no layers": setting(num_hidden_layers=0),
    "hidden size a text": setting(hidden_size="64"),
    "hidden size of another": setting(hidden_size=4096),
    "vocabulary of another": setting(vocab_size=10**6),
    "an unknown family": setting(model_type="rwkv"),
    "another family": setting(model_type="llama"),
    "no positions": setting(max_position_embeddings=0),
    "no weights": removed("model.safetensors"),
    "weights cut": cut("model.safetensors", 0.5),
    "weights empty": written("model.safetensors", b""),
    "weights nonsense": written("model.safetensors", b"nonsense" * 100),
    "a header of 2^60 bytes": written("model.safetensors", (1 << 60).to_bytes(8, "little")),
    "a tensor missing": header(lambda tensors: tensors.pop(EMBEDDING)),
    "a tensor of another shape": header(lambda tensors: tensors[EMBEDDING].update(shape=[1, 1])),
    "a tensor of integers": header(lambda tensors: tensors[EMBEDDING].update(dtype="I32")),
    "a tensor beyond the file": header(lambda tensors: tensors[EMBEDDING].update(data_offsets=[0, 1 << 40])),
    "an index to ../../etc/passwd": index("../../../../etc/passwd"),
    "an index to /etc/passwd": index("/etc/passwd"),
    "an index to a file that is not there": index("none.safetensors"),
    "no tokenizer": removed("tokenizer.json"),
    "tokenizer.json cut": cut("tokenizer.json", 0.5),
    "tokenizer.json {}": written("tokenizer.json", b"{}"),
    "tokenizer_config.json []": written("tokenizer_config.json", b"[]"),
    "a template with a fault": template("{% if %}"),
    "a template that raises": template("{{ raise_exception('no') }}"),
    "a template without an end": template("{% for i in range(10**12) %}{% endfor %}"),
    "a template of an unknown filter": template("{{ messages | nonsense }}"),
    "an empty template": template(""),
}


def model_inputs(base: Sequence[str], model: Path, folder: Path) -> Iterator[Input]:
    for number, (name, edit) in enumerate(MODELS.items()):
        copy = folder / str(number)
        shutil.copytree(model, copy)
        edit(copy)
        yield Input(f"model: {name}", "train", [*base, f"model.path={copy}"])


def replace_by_file(run: Path) -> None:
    shutil.rmtree(run)
    run.write_text("x")


def replace_settings_by_folder(run: Path) -> None:
    (run / "config.json").unlink()
    (run / "config.json").mkdir()


RUNS: dict[str, Edit] = {
    "a file": replace_by_file,
    "config.json torn": cut("config.json", 0.5),
    "config.json a list": written("config.json", b"[]"),
    "config.json a text": written("config.json", b'"x"'),
    "config.json of another run": written("config.json", json.dumps({"optim": {"lr": 0.5}}).encode()),
    "config.json binary": written("config.json", bytes(range(256))),
    "config.json a folder": replace_settings_by_folder,
}


def run_inputs(base: Sequence[str], run: Path, folder: Path) -> Iterator[Input]:
    for number, (name, edit) in enumerate(RUNS.items()):
        copy = folder / str(number)
        shutil.copytree(run, copy)
        edit(copy)
        yield Input(f"run: {name}", "train", [*base, f"run.dir={copy}"])
        if name != "config.json of another run":
            yield Input(f"report: {name}", "report", [str(copy)])
    yield Input("report: no folder", "report", [f"{folder}/none"])
    for name, latest in {"latest binary": b"\xff\xfe\x00", "latest nonsense": b"../../x", "no latest": None}.items():
        copy = folder / name.replace(" ", "-")
        (copy / "checkpoints").mkdir(parents=True)
        if latest is not None:
            (copy / "checkpoints" / "latest").write_bytes(latest)
        yield Input(f"convert: {name}", "convert", [str(copy), f"{copy}/hf"])


# --- How they end --------------------------------------------------------------------------------------------------


class Accepted(BaseException):
    """Ranks would have been started."""


def serve(pipe: Connection) -> None:
    """Main function of a subprocess: run each input that comes and send back how it ended."""
    from megatron_collab import train
    from megatron_collab.commands.__main__ import run
    from megatron_collab.config import Config
    from megatron_collab.launch import program as programs

    def prepared(arguments: list[str], stack: ExitStack) -> str:
        outcome = train.prepared(arguments, stack)
        if isinstance(outcome, str):
            return outcome
        raise Accepted

    while True:
        program, arguments = pipe.recv()
        code: int | str | None = "traceback"
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            try:
                if program == "train":
                    code = programs.run(train.__name__, train.__doc__, Config, arguments, prepared)
                else:
                    code = run(program, arguments)
            except Accepted:
                code = "accepted"
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
        pipe.send((code, out.getvalue()))


class Server:
    """The process that tries inputs; it is replaced if it crashes."""

    def __init__(self) -> None:
        self.first: Input | None = None  # tried first in each process, so that its imports are not timed
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=serve, args=(child_end,))
        self._process.start()
        child_end.close()

    def try_input(self, case: Input) -> Outcome:
        outcome = self._try(case, LIMIT)
        return self._try(case, LIMIT) if outcome.code == "crash" else outcome

    def accept(self, case: Input) -> None:
        """Try a valid input whose files others need; it must be accepted."""
        outcome = self._try(case, IMPORTS)
        assert outcome.code == "accepted", outcome.output

    def _try(self, case: Input, limit: float) -> Outcome:
        began = time.monotonic()
        self._pipe.send((case.program, case.arguments))
        try:
            if self._pipe.poll(limit):
                code, output = self._pipe.recv()
                return Outcome(code, output, time.monotonic() - began)
            output = f"no end after {limit:g} s"
        except EOFError:
            self._process.join()
            output = f"ended with {self._process.exitcode}"
        seconds = time.monotonic() - began
        self.end()
        self._start()
        if self.first:
            self._try(self.first, IMPORTS)
        return Outcome("crash", output, seconds)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def measure(server: Server, folder: Path, every: int, show: bool) -> dict[str, float]:
    from megatron_collab.launch.validate import load

    world, run = folder / "world", folder / "run"
    common = [f"run.dir={run}", f"data.dir={world}", f"model.path={world}/model", "launch.device=cpu"]
    base = ["experiment=booking", *common]
    server.accept(Input("base", "train", base))
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(asdict(load(base))))
    server.accept(Input("again", "train", base))
    # Without the generated world, which would replace data and model.
    own_data = [
        *common[1:],
        f"run.dir={folder}/own",
        "train.stage=rl",
        "reward.weights={token_amount: -1}",
        "user.name=replay",
        "train.steps=1",
    ]
    own_data += ["rollout.context_length=256", "rollout.turn.max_new_tokens=24", "rollout.future.max_new_tokens=24"]
    rows = folder / "good.jsonl"
    rows.write_bytes(GOOD)
    server.first = Input("good", "train", [*own_data, f"data.train={rows}"])
    server.accept(server.first)
    inputs = [*option_inputs(base), *data_inputs(own_data, folder / "data")]
    inputs += model_inputs([*own_data, f"data.train={rows}"], world / "model", folder / "models")
    inputs += run_inputs(base, run, folder / "runs")
    outcomes = []
    for case in inputs[::every]:
        outcome = server.try_input(case)
        outcomes.append(outcome)
        if show or outcome.code != 2 or outcome.output.count("\n") > 1:
            print(
                f"{outcome.code}\t{outcome.seconds:.1f} s\t{case.name[:80]}\t{outcome.output.strip()[-600:]}",
                flush=True,
            )
    values = {
        "inputs": len(outcomes),
        "traceback": sum(outcome.code not in (2, "accepted", "crash") for outcome in outcomes),
        "accepted_nonsense": sum(outcome.code == "accepted" for outcome in outcomes),
        "over_two_lines": sum(outcome.output.count("\n") > 2 for outcome in outcomes),
        "crash": sum(outcome.code == "crash" for outcome in outcomes),
        "seconds": round(max(outcome.seconds for outcome in outcomes), 1),
    }
    assert all(map(math.isfinite, values.values()))
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="every 25th input")
    parser.add_argument("--show", action="store_true", help="print what every input printed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        values = measure(server, Path(folder), 25 if arguments.smoke else 1, arguments.show)
    print(json.dumps({"name": "bad_input", "values": values}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
