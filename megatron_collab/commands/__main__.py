"""The program `megatron-collab`, also `python -m megatron_collab.commands`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_collab import __version__
from megatron_collab.commands import EXIT_BAD_INPUT
from megatron_collab.runtime import console, gpu_environment, network, screen, signals
from megatron_collab.runtime.files import COMPILE_CACHE

logger = logging.getLogger("megatron_collab")  # __name__ is __main__ if this module is the program

COMMANDS = {
    "train": "train a policy: experiment=NAME [option=value …]",
    "evaluate": "evaluate a checkpoint, a Hugging Face folder or any LiteLLM model, without training",
    "build-dataset": "build conversations turn by turn from the best of several candidates, as training rows",
    "reproduce": "reproduce a published comparison: train and evaluate its assistants, and compare the tables",
    "quickstart": "train on the booking world, supervised and then with GRPO, on two CPU cores",
    "doctor": "check this machine; --plan: GPU memory of a run; --data: rows; --llm: call its models",
    "prepare-data": "convert published data to training rows, split by conversation",
    "users-from-logs": "make tasks and users from a product's conversations; measure how real simulated users are",
    "rehearse": "simulate the memory of a run, rank by rank, up to the first that does not fit",
    "plan-sync": "predict the weight sync of a run: bytes by path, rounds, seconds",
    "convert": "convert a checkpoint to a Hugging Face folder, or back",
    "view": "look at runs in a browser: curves, evaluations, every conversation",
    "chat": "talk with the models of a run in the terminal, also as its simulated users; sample futures",
    "serve": "serve a model of a run to other programs (OpenAI-compatible)",
    "report": "rewrite report.html of a run",
    "export": "write the transcripts of a run as lines of JSON",
    "score": "score the futures of a run under several rewards, side by side",
    "recording": "show recorded calls of users and judges: contents, price, latency; merge or scrub them",
}
# These replace this process, to block the preemption signal before they import.
PROGRAMS = {
    "train": "megatron_collab.train",
    "evaluate": "megatron_collab.evaluate",
    "build-dataset": "megatron_collab.synthesis.build_dataset",
    "reproduce": "megatron_collab.reproduce",
}
# Commands in a package of their own, which no other module of the core names; the others are in this one.
SATELLITES = {
    "users-from-logs": "megatron_collab.user_logs.command",
    "rehearse": "megatron_collab.rehearsal.command",
    "view": "megatron_collab.view.command",
    "chat": "megatron_collab.talk.chat",
    "serve": "megatron_collab.talk.serve",
}

_OF_LOGS = ("presidio_analyzer", "sklearn", "datasketch", "spacy")  # heavy, and needed by one command only


def main() -> int:
    name, *arguments = console.take_flags(sys.argv[1:]) or ["--help"]
    console.begin()
    if name in ("-h", "--help"):
        commands = "\n".join(f"  {command:16}{text}" for command, text in COMMANDS.items())
        print(f"usage: megatron-collab [--version] [--quiet] [--verbose] [--plain] COMMAND …\n{commands}")
        print("megatron-collab COMMAND --help: its options")
        return 0
    if name == "--version":
        print(f"megatron-collab {__version__}")
        return 0
    if name in PROGRAMS:
        screen.note(f"megatron-collab {name}: importing")
        os.execv(sys.executable, [sys.executable, "-m", PROGRAMS[name], *arguments])
    if name == "doctor":  # imports what a run imports
        gpu_environment.reload()
    signals.end_commands()
    return run(name, arguments)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a command of COMMANDS that is not in PROGRAMS. If it refuses its input: one line, and exit code 2."""
    os.environ |= network.without_proxy()
    os.environ.setdefault(*COMPILE_CACHE)  # before a command imports torch
    try:
        from megatron_collab.settings import ConfigError, nearest, require

        require(name in COMMANDS, f"no command {name!r}{nearest(name, COMMANDS)} (all commands: --help)")
        command = import_module(SATELLITES.get(name, f"megatron_collab.commands.{name.replace('-', '_')}"))
        return int(command.main(arguments))
    except ModuleNotFoundError as error:
        extra = "logs" if name == "users-from-logs" and error.name in _OF_LOGS else "cpu or gpu"
        fault = f"{error.name} is not installed; install the extra {extra}, e.g. megatron-collab[{extra.split()[0]}]"
    except (ConfigError, OSError) as error:
        fault = str(error)
    logger.error(fault)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
