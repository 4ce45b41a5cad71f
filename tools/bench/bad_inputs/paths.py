"""Paths at which there is something else than a command reads or writes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from bad_inputs.valid import Files, Input

LONG = "x" * 300


def inputs(files: Files, bases: dict[str, Input]) -> Iterator[Input]:
    places = _places(files.folder / "places")
    for number, (base_name, words) in enumerate(READS.items()):
        for name in [*places][number % 2 :: 2]:  # every place is that of ten readers
            yield _at(bases[base_name], words, name, places[name])
    writable = _unwritable(files.folder / "taken")
    for base_name, words in WRITES.items():
        for name, path in writable.items():
            yield _at(bases[base_name], words, name, path)


def _at(base: Input, words: str, name: str, path: str) -> Input:
    """The input with this path: in place of the argument that is PATH's name, else added."""
    added = tuple(word.replace("PATH", path) for word in words.split(" "))
    kept = [*base.arguments]
    option, sign, _ = added[0].partition("=")
    if added[0].isdigit():  # an argument without a name
        kept[int(added[0])] = added[1]
        added = ()
    elif sign:
        kept = [word for word in kept if not word.startswith(f"{option}=")]
    elif option in kept:
        at = kept.index(option)
        del kept[at : at + 2]
    return Input(f"{words.replace('PATH', '')} {name}", base.command, (*kept, *added))


# Valid inputs and the argument in which they read PATH; a number: that argument itself.
READS = {
    "train rl": "data.train=PATH",
    "train sft": "model.path=PATH",
    "train": "rollout.system_prompt=PATH",
    "train dpo": "run.fork=PATH",
    "evaluate": "data.eval=PATH",
    "evaluate run": "model.path=PATH",
    "build-dataset": "build.prompt=PATH build.proactive=0.5",
    "users-from-logs": "0 PATH",
    "realism": "--realism PATH",
    "doctor data": "--data PATH",
    "doctor plan": "--plan experiment=train_8b model.path=PATH",
    "doctor llm": "user.prompt=PATH",
    "plan-sync": "model.path=PATH",
    "rehearse": "model.path=PATH",
    "prepare-data": "0 PATH",
    "convert": "--model PATH",
    "to checkpoint": "0 PATH",
    "recording": "1 PATH",
    "report": "0 PATH",
    "export": "0 PATH",
    "score": "0 PATH",
}


def _places(folder: Path) -> dict[str, str]:
    """Paths of which none is of use to any command."""
    folder.mkdir()
    paths = {
        "nothing": folder / "none",
        "an empty folder": folder / "empty",
        "an empty file": folder / "empty.jsonl",
        "a named pipe": folder / "pipe.jsonl",
        "a device": Path("/dev/zero"),
        "a loop of links": folder / "loop",
        "a link to nothing": folder / "dangling",
        "below a file": folder / "empty.jsonl" / "x",
        "a name that is too long": folder / LONG,
        "a name that is not UTF-8": Path(os.fsdecode(bytes(folder) + b"/caf\xe9")),
        "a socket": folder / "socket",
        "binary": folder / "binary",
        "a memory file": Path("/proc/self/mem"),
        "a folder of the system": Path("/sys/kernel"),
    }
    paths["an empty folder"].mkdir()
    paths["an empty file"].touch()
    os.mkfifo(paths["a named pipe"])
    paths["a loop of links"].symlink_to(paths["a loop of links"])
    paths["a link to nothing"].symlink_to(folder / "nowhere")
    paths["binary"].write_bytes(bytes(range(256)) * 40)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(paths["a socket"]))
    return {name: str(path) for name, path in paths.items()}


# Valid inputs and the argument in which they write a folder PATH.
WRITES = {
    "train sft": "run.dir=PATH",
    "train": "data.dir=PATH",
    "evaluate": "run.dir=PATH",
    "build-dataset": "run.dir=PATH",
    "users-from-logs": "--out PATH",
    "prepare-data": "--out PATH",
    "convert": "1 PATH",
    "to checkpoint": "1 PATH",
    "scrub": "--out PATH",
    "reproduce": "--out PATH",
    "quickstart": "--root PATH",
    "realism": "--out PATH",
    "export": "--out PATH",
    "score": "--out PATH",
}


def _unwritable(folder: Path) -> dict[str, str]:
    """Paths at which no file and no folder can be written."""
    folder.mkdir()
    loop = folder / "loop"
    loop.symlink_to(loop)
    (folder / "file").write_text("x")
    paths = {
        "below a file": folder / "file" / "x",
        "below a device": Path("/dev/null/x"),
        "in /proc": Path("/proc/x"),
        "a loop of links": loop,
        "a name that is too long": folder / LONG,
    }
    return {name: str(path) for name, path in paths.items()}
