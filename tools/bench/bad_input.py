"""How every command ends if its input cannot work: options, files and command lines, wrong in every way we know.

`python tools/bench/bad_input.py`: the valid command lines of all commands (bad_inputs/valid.py) with values of options
below and above what they may be and of another type, words of other trainers, damaged files of data, models, runs and
recordings, paths at which there is something else, and mistakes of the command line. Each input goes through the whole
start in a process of its own, up to the moment when a process, a server or a call of a language model would be started,
and must end it with exit code 2 and one line. The valid command lines come first; each must be accepted.

    inputs = how many;
    traceback = inputs that ended with a traceback or another exit code;
    accepted_nonsense = inputs with which the work would have been started;
    over_two_lines = inputs that printed more than two lines;
    crash = inputs that ended the interpreter or took longer than 20 s, and when tried again 60 s, as on a busy machine;
    seconds = of the slowest input.

--show prints what each of them printed; --only TEXT: inputs with TEXT in their name or command; --smoke: every 60th.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bad_inputs import command_lines, damage, options, paths
from bad_inputs.valid import OUT, Files, Input, valid

LIMIT, LAST_LIMIT = 20.0, 60.0  # seconds, of the first and of the second attempt
MEMORY = 8 << 30  # bytes that an attempt may allocate
VALID_LIMIT = 300.0  # of a valid input
EVERY = 60
# Modules of which an argument of the command is one, if a command starts a program of ours or Ray.
STARTED = ("megatron_collab.train", "megatron_collab.evaluate", "megatron_collab.synthesis.build_dataset")
COMMANDS = "megatron_collab.commands"
SERVERS = "megatron_collab.rehearsal.servers"
# What inputs import late, so that each process finds it imported.
IMPORTED = (
    *("datasets", "transformers", "litellm", "sglang.srt.server_args", "presidio_analyzer", "sklearn.linear_model"),
    *("datasketch", "spacy", "matplotlib.figure", "huggingface_hub", "megatron_collab.user_logs.realism"),
    *("megatron_collab.commands.convert", "megatron_collab.commands.doctor", "megatron_collab.commands.plan_sync"),
    *("megatron_collab.commands.prepare_data", "megatron_collab.commands.score", "megatron_collab.commands.report"),
    *("megatron_collab.commands.recording", "megatron_collab.commands.quickstart", "megatron_collab.planning.memory"),
    *("megatron_collab.checkpoint.convert", "megatron_collab.commands.verify", "megatron_collab.rollout.recorded"),
    *(
        "megatron_collab.planning.weight_sync_cost",
        "megatron_collab.launch.evaluation",
        "megatron_collab.reward.comparison",
    ),
    *("megatron_collab.data.datasets", "megatron_collab.data.preparation", "megatron_collab.user_logs.descriptions"),
    *("megatron_collab.launch.help", "megatron_collab.reward.workers", "megatron_collab.user_logs.personal"),
    *("megatron_collab.rehearsal.command", "megatron_collab.rehearsal.run", "megatron_collab.user_logs.command"),
    *("megatron_collab.reproduce.__main__", "megatron_collab.data.survey", "megatron_collab.data.examples", *STARTED),
)


class Outcome(NamedTuple):
    """How a command ended: `code` is its exit code, "accepted" or "crash"."""

    case: Input
    code: int | str
    output: str
    seconds: float


# --- One input, in a process of its own ----------------------------------------------------------------------------


def attempt(case: Input, folder: Path) -> NoReturn:
    """Main function of the process: run the command with `folder` in place of OUT; output goes to `folder`/output."""
    os.setsid()  # so that processes that it starts end with it
    folder.mkdir()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    sys.addaudithook(_watch)
    arguments = [argument.replace(OUT, str(folder)) for argument in case.arguments]
    _end(_exit_code(case.command, arguments))


def _exit_code(command: str, arguments: list[str]) -> int:
    from megatron_collab.commands.__main__ import PROGRAMS, run
    from megatron_collab.runtime import console

    try:
        if command not in PROGRAMS:
            arguments = console.take_flags(arguments)
            console.begin()
            return run(command, arguments)
        module = PROGRAMS[command]
        module = f"{module}.__main__" if command == "reproduce" else module
        return int(import_module(module).main(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: the moment at which the work would begin. A program of ours goes on in this process."""
    if event == "os.exec" or (event == "socket.connect" and arguments[1][:2] == ("127.0.0.1", 9)):
        _end(0)
    if event == "subprocess.Popen":
        words = [str(word) for word in arguments[1]]
        if SERVERS in words or any("gcs_server" in word for word in words):
            _end(0)
        if COMMANDS in words:
            command, *words = words[words.index(COMMANDS) + 1 :]
            _end(_exit_code(command, words))
        for module in STARTED:
            if module in words:
                name = "build-dataset" if "build" in module else module.rpartition(".")[2]
                _end(_exit_code(name, words[words.index(module) + 1 :]))


def _end(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class Attempt:
    """A running attempt at an input."""

    def __init__(self, case: Input, folder: Path, limit: float) -> None:
        self.case, self.folder, self.began = case, folder, time.monotonic()
        self.ends = self.began + limit
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=attempt, args=(case, folder))
        self.process.start()

    def outcome(self) -> Outcome | None:
        """How it has ended; None while it runs. Ends it if its time is over."""
        late = time.monotonic() > self.ends
        if self.process.exitcode is None and not late:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        code, seconds = self.process.exitcode, time.monotonic() - self.began
        file = self.folder / "output"
        output = file.read_text(errors="replace") if file.is_file() else ""
        shutil.rmtree(self.folder, ignore_errors=True)
        if code is None or code < 0:
            return Outcome(self.case, "crash", f"{output}{'no end' if late else f'ended with {code}'}", seconds)
        return Outcome(self.case, code or "accepted", output, seconds)


def attempts(cases: Sequence[Input], folder: Path, limit: float, jobs: int) -> Iterator[Outcome]:
    """The outcomes of all inputs, `jobs` at a time. Those that crash are tried once more."""
    waiting, running, retried, number = [*reversed(cases)], list[Attempt](), set[Input](), 0
    while waiting or running:
        while waiting and len(running) < jobs:
            number += 1
            case = waiting.pop()
            longest = max(limit, LAST_LIMIT) if case in retried else limit
            running.append(Attempt(case, folder / f"attempt-{number}", longest))
        wait([current.process.sentinel for current in running], timeout=1.0)
        for current in [*running]:
            if outcome := current.outcome():
                running.remove(current)
                if outcome.code == "crash" and outcome.case not in retried:
                    retried.add(outcome.case)
                    waiting.append(outcome.case)
                else:
                    yield outcome


# --- All of them ----------------------------------------------------------------------------------------------------


def bad_inputs(files: Files, bases: dict[str, Input]) -> list[Input]:
    bases = {name: base for name, base in bases.items() if name != "start of a run"}
    inputs = [*paths.inputs(files, bases), *damage.inputs(files, bases), *command_lines.inputs(files, bases)]
    return [*dict.fromkeys([*inputs, *options.inputs(bases)])]


def prepare(files: Files, scratch: Path, smoke: bool) -> dict[str, Input]:
    """Write the files and try the valid inputs, which make the world and the checkpoint."""
    files.write()
    bases = valid(files)
    for name, case in bases.items():
        if name == "report":
            files.write_run(bases["train rl"])
        if smoke and name not in ("train", "start of a run"):
            continue
        (outcome,) = attempts([case], scratch, VALID_LIMIT, 1)
        assert outcome.code == "accepted", (name, outcome)
        if not smoke:
            print(f"valid\t{outcome.seconds:.1f} s\t{name}", flush=True)
    return bases


def measure(files: Files, scratch: Path, every: int, only: str, show: bool) -> dict[str, float]:
    bases = prepare(files, scratch, smoke=every > 1)
    inputs = bad_inputs(files, bases)
    chosen = [case for case in inputs if only in f"{case.command} {case.name}"][::every]
    outcomes = []
    for outcome in attempts(chosen, scratch, LIMIT, len(os.sched_getaffinity(0))):
        outcomes.append(outcome)
        case, code, output, seconds = outcome
        if show or code != 2 or output.count("\n") > 1:
            text = output.strip()[-600:]
            print(
                f"{code}\t{seconds:.1f} s\t{case.command}\t{case.name[:100]}\t{text}".encode(errors="replace").decode(),
                flush=True,
            )
    by_command = Counter(outcome.case.command for outcome in outcomes)
    print(", ".join(f"{command} {count}" for command, count in by_command.most_common()))
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


def imports() -> None:
    """Import what the inputs need. Only forks run them: a process with threads must not be forked."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    os.environ.setdefault("OPENAI_API_KEY", "sk-none")
    from megatron_collab import patches

    for part in ("transformers", "megatron", "litellm"):
        patches.apply(part)
    for name in IMPORTED:
        import_module(name)
    extra = [thread.name for thread in threading.enumerate()[1:]]
    assert not extra, extra


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help=f"every {EVERY}th input")
    parser.add_argument("--only", default="", metavar="TEXT", help="inputs with TEXT in their command or name")
    parser.add_argument("--show", action="store_true", help="print what every input printed")
    arguments = parser.parse_args()
    imports()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        every = EVERY if arguments.smoke else 1
        values = measure(Files(Path(folder)), Path(scratch), every, arguments.only, arguments.show)
    print(json.dumps({"name": "bad_input", "values": values}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
