"""Write training rows from published data: train and eval, and a summary of what was kept and dropped.

    megatron-collab prepare-data collabllm/collabllm-multiturn-math-hard --to rl --out data/math --system-prompt FILE.j2

--to rl: a task for every prefix of every conversation that ends with the user, each prompt once. --to sft: a row for
each conversation; of scored candidates the best of its last turn. --to dpo: of each turn the best candidate against the
worst. --to opened: a task for each goal, without a message, so that the user opens the conversation. SOURCE is a file,
a folder, a glob or a name of the Hub, or settings as '{source: NAME, subset: NAME}'. All its splits are read unless it
has split: NAME. The new split is by the first message of the user, so that no prompt is on both sides, and a
conversation is on the same side for rl and sft.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_collab.commands import ArgumentParser, positive
from megatron_collab.launch.prompts import try_prompt
from megatron_collab.runtime.console import show
from megatron_collab.settings import WRITTEN_FOLDER, ConfigError, check_path, read_prompt, require

SUMMARY = "summary.json"


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    file = options.system_prompt
    try_prompt("--system-prompt", file or "")
    system = read_prompt("--system-prompt", file, "", ()) if file else None

    # Hugging Face's libraries take seconds to import, so arguments are checked first.
    from megatron_collab.data.chat_template import ChatRenderer
    from megatron_collab.data.datasets import to_parquet
    from megatron_collab.data.preparation import Preparation, groups_of_eval
    from megatron_collab.data.sources import parse_sources
    from megatron_collab.data.survey import unread_note
    from megatron_collab.runtime import hub, screen

    source, *more_sources = parse_sources(options.source, "SOURCE")
    require(not more_sources, f"SOURCE={options.source}: prepare one source at a time, and mix them in data.train")
    try:
        if options.model and hub.parse(options.model):
            hub.download(options.model, "--model")
        renderer = ChatRenderer(options.model, setting="--model") if options.model else None
        text = system.render().strip() if system else ""
        preparation = Preparation(source, options.to, text, options.gap, renderer, options.max_tokens or 0)
        with screen.phase(f"grouping {source.title}"):
            groups = Counter(example.group for example in preparation)
        require(bool(groups), f"SOURCE={source.source}: no rows are left: {_joined_counts(preparation.dropped)}")
        dropped, unread = dict(preparation.dropped), dict(preparation.unread)
        held_out = groups_of_eval(groups, options.eval_share, options.seed)
        options.out.mkdir(parents=True, exist_ok=True)
        counts = {"train": 0} | ({"eval": 0} if held_out else {})
        with ExitStack() as stack, screen.phase(f"writing {options.out}"):
            files = {side: stack.enter_context((options.out / f"{side}.jsonl").open("w")) for side in counts}
            for example in preparation:
                side = "eval" if example.group in held_out else "train"
                files[side].write(json.dumps(example.row, ensure_ascii=False) + "\n")
                counts[side] += 1
        if options.parquet:
            for side in counts:
                to_parquet(options.out / f"{side}.jsonl")
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    examples = preparation.examples
    summary = {
        "source": source.source,
        "format": examples.format,
        "why": examples.why,
        "to": options.to,
        "splits": list(examples.splits),
        "rows": len(examples.rows),
        "conversations": len(groups),
        "kept": counts,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "unread": unread,
    }
    (options.out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    rows = f"{len(examples.rows)} rows (split {'+'.join(examples.splits)})"
    show(f"{source.source}: {rows}, read as {examples.format} ({examples.why})")
    kept = ", ".join(f"{count} for {side}" for side, count in counts.items())
    show(f"{options.out}: {kept}, of {len(groups)} conversations; dropped: {_joined_counts(dropped) or 'none'}")
    if unread:
        show(f"{source.source}: {unread_note(unread)}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command. Raises ConfigError for values that cannot work together, or a folder with rows."""
    parser = ArgumentParser("prepare-data", __doc__)
    parser.add_argument("source", help="file, folder, glob, name of the Hub, or settings in braces")
    parser.add_argument("--to", required=True, choices=("rl", "sft", "dpo", "opened"), help="what the rows are for")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--eval-share", type=float, default=0.1, help="share of the conversations for evaluation [0.1]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split [0]")
    parser.add_argument("--system-prompt", metavar="FILE.j2", help="system message of all rows")
    parser.add_argument("--max-tokens", type=int, help="drop longer prompts (rl) and conversations; needs --model")
    parser.add_argument("--model", help="folder or name of the model whose tokens are counted")
    parser.add_argument("--gap", type=positive, default=0.02, help="dpo: smallest difference of two scores [0.02]")
    parser.add_argument("--parquet", action="store_true", help="write Parquet instead of JSONL")
    options = parser.parse_args(arguments)
    require(0 <= options.eval_share < 1, f"--eval-share={options.eval_share:g}: must be at least 0 and below 1")
    require((options.max_tokens is None) == (options.model is None), "--max-tokens and --model: give both or neither")
    message = f"--max-tokens={options.max_tokens}: tasks that the user opens have no prompt; remove it"
    require(options.max_tokens is None or options.to != "opened", message)
    require(options.max_tokens is None or options.max_tokens > 0, f"--max-tokens={options.max_tokens}: must be above 0")
    check_path("--out", options.out, WRITTEN_FOLDER)
    written = (SUMMARY, *(f"{side}.{suffix}" for side in ("train", "eval") for suffix in ("jsonl", "parquet")))
    existing = [name for name in written if (options.out / name).exists()]
    require(not existing, f"--out={options.out}: holds {', '.join(existing)}; remove it, or give another folder")
    return options


def _joined_counts(dropped: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
