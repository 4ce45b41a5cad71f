"""Mistakes of the command line: options and values that a command does not have, forgotten or in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bad_inputs.valid import OUT, Files, Input

LATIN = "caf\udce9"  # a name in Latin-1, as Python reads it from the command line
NUMBERS = ("", "x", "1e400", "nan", "-1")


def inputs(files: Files, bases: dict[str, Input]) -> Iterator[Input]:
    for name, command, arguments in _mistakes(files, bases):
        yield Input(f"{name}: {' '.join(arguments)}".replace(str(files.folder), ""), command, tuple(arguments))


def _mistakes(files: Files, bases: dict[str, Input]) -> Iterator[tuple[str, str, Sequence[str]]]:
    for name, base in bases.items():
        words = base.arguments
        yield "unknown option", base.command, (*words, "--nonsense")
        yield "unknown option with a value", base.command, (*words, "--nonsense=1")
        if base.command in ("train", "evaluate", "build-dataset", "plan-sync", "rehearse"):
            yield f"an empty argument of {name}", base.command, (*words, "")
            yield f"a word of {name}", base.command, (*words, "nonsense")
            yield f"a name in Latin-1 of {name}", base.command, (*words, f"{LATIN}=1")
        else:
            yield "unknown letter", base.command, (*words, "-x")
        if name != "quickstart":
            yield f"nothing for {name}", base.command, words[1:]
    for command in {base.command for base in bases.values()} - {"doctor", "quickstart"}:
        yield "nothing at all", command, ()
    for option, values in NUMERIC.items():
        name, _, flag = option.rpartition(" ")
        words = _without(bases[name].arguments, flag)
        yield "no value", bases[name].command, (*words, flag)
        for value in values:
            yield "no such number", bases[name].command, (*words, f"{flag}={value}")
    for name, texts in TEXTS.items():
        base = bases[name]
        for text in texts:
            words = text.replace("MODEL", str(files.model)).replace("RUN", str(files.run)).split(" ")
            yield name, base.command, (*base.arguments, *words)
    model, run, rows = str(files.model), str(files.run), str(files.conversations)
    for command, arguments in (
        ("convert", (f"{OUT}/hf", run, "--model", model)),
        ("convert", (run, f"{OUT}/hf", "--model", model, "--to-megatron")),
        ("convert", (model, f"{OUT}/hf", "--model", model)),
        ("convert", (run, f"{OUT}/hf", "--to-megatron")),
        ("convert", (run, run, f"{OUT}/hf", "--model", model)),
        ("convert", (f"{run}@1000", f"{OUT}/hf", "--model", model)),
        ("convert", (f"{run}@best", f"{OUT}/hf", "--model", model)),
        ("convert", (f"{run}@", f"{OUT}/hf", "--model", model)),
        ("convert", (run, f"{OUT}/hf", "--model", run)),
        ("convert", (run, f"{OUT}/hf", "--model", model, "--peft")),
        ("prepare-data", ("--to", "sft", rows, rows, "--out", f"{OUT}/rows")),
        ("prepare-data", (rows, "--to", "sft", "--out", str(files.conversations))),
        ("prepare-data", (rows, "--to", "dpo", "--out", f"{OUT}/rows")),
        ("prepare-data", (str(files.tasks), "--to", "sft", "--out", f"{OUT}/rows")),
        ("prepare-data", ("{source: x, subsett: y}", "--to", "sft", "--out", f"{OUT}/rows")),
        ("prepare-data", ("[a, b]", "--to", "sft", "--out", f"{OUT}/rows")),
        ("prepare-data", ("{", "--to", "sft", "--out", f"{OUT}/rows")),
        ("prepare-data", ("", "--to", "sft", "--out", f"{OUT}/rows")),
        ("doctor", ("--data", "{source: x, subsett: y}")),
        ("doctor", ("--data", "[[a]]")),
        ("doctor", ("--data", "[]")),
        ("doctor", ("--data", "{}")),
        ("doctor", ("--data", "")),
        ("doctor", ("--data", "{source: 3, split: 4}")),
        ("doctor", ("--plan",)),
        ("doctor", ("--llm",)),
        ("doctor", ("--llm", "experiment=nonsense")),
        ("doctor", ("experiment=booking",)),
        ("recording", ("play", str(files.recording))),
        ("recording", (str(files.recording), "show")),
        ("recording", ("show",)),
        ("recording", ("merge", str(files.recording))),
        ("recording", ("merge", str(files.recording), "--out", str(files.recording))),
        ("report", (run, run)),
        ("report", (f"{run}@0",)),
        ("view", (f"{run}@0",)),
        ("view", (run, "--port", "65536")),
        ("view", (run, "--port", "x")),
        *((name, arguments) for name in ("chat", "serve") for arguments in _of_models(run)),
        ("chat", (run, "--task", "x", "--index", "0")),
        ("chat", (run, "--index", "x")),
        ("chat", (run, "--user", "x")),
        ("serve", (run, "--port", "65536")),
        ("serve", (run, "--port", "x")),
        ("serve", (run, "--host", "nonsense")),
        ("export", (run, "--step", "x")),
        ("export", (run, "--step", "7")),
        ("export", (run, "--step", "0", "--evaluation", "before")),
        ("export", (run, "--evaluation", "")),
        ("score", (run, "--reward", "")),
        ("score", (run, "--reward", "nonsense")),
        ("score", ("--reward", "run")),
        ("score", (run, "run")),
        ("users-from-logs", (rows, rows, "--out", f"{OUT}/users")),
        ("reproduce", ("nonsense",)),
        ("reproduce", ("",)),
        ("reproduce", ("booking", "collabllm")),
        ("reproduce", ("none.yaml",)),
        ("rehearse", ("--ranks", "all")),
        ("plan-sync", ("experiment=train_8b", "--bandwidth", "1", "2")),
        ("plan-sync", ("--bandwidth", "1", "2", "3", "experiment=booking_sft")),
        ("plan-sync", ("experiment=train_8b", "--bandwidth", "0", "1", "1")),
        ("plan-sync", ("experiment=train_8b", "--bandwidth", "inf", "1", "1")),
        ("nonsense", ()),
        ("evalaute", ("experiment=booking",)),
        ("", ()),
        ("serve", ("model.path=x",)),
        ("merge", ("x",)),
        ("sft", ("--model", "x")),
        ("TRAIN", ()),
    ):
        yield "order", command, arguments


def _without(words: Sequence[str], flag: str) -> tuple[str, ...]:
    """The arguments without this option and its value."""
    at = words.index(flag) if flag in words else len(words)
    return (*words[:at], *words[at + 2 :])


# Options of commands with a number, as VALID-INPUT --OPTION, and what they cannot be.
NUMERIC: dict[str, Sequence[str]] = {
    "quickstart --seed": (*NUMBERS, "4294967296"),
    "reproduce --seeds": (*NUMBERS, "0"),
    "reproduce --train-seeds": (*NUMBERS, "0"),
    "reproduce --first-seed": NUMBERS,
    "reproduce --jobs": (*NUMBERS, "0"),
    "reproduce --pilot": NUMBERS,
    "reproduce --budget": (*NUMBERS, "0", "inf"),
    "doctor plan --gpu-gib": (*NUMBERS, "0", "inf"),
    "rehearse --gpu-gib": (*NUMBERS, "0", "inf"),
    "prepare-data --eval-share": (*NUMBERS, "1", "1.5"),
    "prepare-data --seed": ("", "x", "1.5", "nan"),
    "prepare-data --max-tokens": (*NUMBERS, "0", "10"),
    "prepare-data --gap": (*NUMBERS, "0", "inf"),
    "convert --shard-size": (*NUMBERS, "0", "5XB", "0GB"),
    "users-from-logs --eval-share": (*NUMBERS, "1"),
    "users-from-logs --seed": ("", "x", "1.5"),
    "realism --step": ("", "x", "1.5", "7", "-1"),
    "realism --seed": ("", "x", "-1", "4294967296"),
    "score --step": ("", "x", "1.5", "7", "-1"),
    "recording --calls": ("", "x", "1.5", "-1"),
}
# Arguments that are added to valid inputs.
TEXTS: dict[str, Sequence[str]] = {
    "prepare-data": (
        *("--to ppo", "--model MODEL", "--max-tokens 5 --model /none", "--max-tokens 5 --model no/such", "--to"),
        *(
            "--max-tokens 5 --model MODEL --to opened",
            "--system-prompt",
            "--system-prompt /none.j2",
            "--gap x",
            "--pa rquet",
        ),
        *("--max-tokens 5 --model RUN", "train.steps=1"),
    ),
    "convert": (
        "--dtype float16",
        "--dtype",
        "--model",
        "--verify 1",
        "--verify --peft",
        "--step 3",
        "--peft --verify",
    ),
    "to checkpoint": ("--peft", "--dtype int8", "--model MODEL", "--verify=1"),
    "score": (
        *("--step 0 --evaluation before", "--evaluation none", "--evaluation", "--reward papper", "--out"),
        *("reward.weights={nonsense: 1}", "reward.jugde=1", "reward.judge.model=policy --reward verl"),
        *("reward.mode=nonsense", "--reward verl reward.judge.model=null", "reward.weights={accuracy: nan}"),
        *("--evaluation ../../etc/passwd", "run.dir=/none data.train=/none"),
    ),
    "realism": ("--step 0 --evaluation before", "--evaluation none", "--person nobody", "--spacy no_such_model"),
    "users-from-logs": (
        *("--person nobody", "--spacy no_such_model", "--spacy", "--prompt /none.j2", "--realism /none", "--person"),
        *("--step x", "--out", "experiment=nonsense"),
    ),
    "reproduce": (
        *("--tasks nonsense", "--tasks ,", "--arms nonsense", "--arms ,,", "--replay /none", "--replay", "--model"),
        *("optim.lr=nan", "foo.bar=1", "--tasks=", "llm.budget_usd=-1", "train.steps=0", "--record"),
    ),
    "scrub": ("--pattern (", "--pattern [a", "--pattern", "--field", "--pattern *"),
    "recording": ("--out", "--calls", "/none"),
    "doctor plan": ("--data", "--gpu-gib", "nonsense"),
    "doctor data": ("extra", "--plan", "--gpu-gib 0"),
    "report": ("--out x", "--step 3"),
    "rehearse": ("--ranks some", "--ranks", "--gpu-gib"),
    "plan-sync": ("--bandwidth", "--bandwidth x y z", "--bandwidth -1 1 1", "--gpus 8"),
    "quickstart": ("--root", "--seed", "--steps 3", "--compare=1"),
}


def _of_models(run: str) -> Iterator[tuple[str, ...]]:
    """Arguments of the commands that serve a model of a run."""
    yield ()
    yield ("none",)
    yield (f"{run}@0",)
    yield (run, "--step", "nonsense")
    yield (run, "--step", "99")
    yield (run, "--step", "")
    yield (run, "rollout.turn.max_new_tokens=x")
    yield (run, "nonsense=1")
