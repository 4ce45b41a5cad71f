"""The data of a run: the sources of data.train and data.eval, surveyed; their order; the batches of SFT.

A survey is kept in run.dir/data, beside the rows as Arrow: what one process has read once, the others find there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from megatron_collab import __version__
from megatron_collab.config import Config, nearest, require
from megatron_collab.data.candidates import paired
from megatron_collab.data.chat_template import ChatRenderer, policys, system_prompt, tokenizer_files
from megatron_collab.data.evaluation import EvaluationSet, evaluation_sets, settings_of
from megatron_collab.data.examples import Examples, TaskReader, load_conversations, load_pairs, load_tasks
from megatron_collab.data.formats import FORMATS
from megatron_collab.data.mixture import Mixture
from megatron_collab.data.pairs import Pair, conversations
from megatron_collab.data.prefixes import at_every_depth
from megatron_collab.data.readers import Messages, Row
from megatron_collab.data.sources import TrainingSource, sources, unread
from megatron_collab.data.survey import Needs, Survey, survey
from megatron_collab.data.tool_messages import ToolConversation
from megatron_collab.runtime import files, hub
from megatron_collab.types import Batch, Message, Sample, Task

__all__ = ["TaskReader"]  # the interface for extensions
FOLDER = "data"  # in run.dir


class SurveyedSources[Read]:
    """The sources of data.train or data.eval (`setting`), and of each the examples that the run takes: `sets`.

    Tasks for rl, conversations for sft, pairs for dpo. Those that do not fit into rollout.context_length are left out.
    """

    def __init__(
        self,
        config: Config,
        setting: str,
        sources: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] = (),
        needs: Callable[[Config], Needs] = lambda config: Needs(),
    ) -> None:
        """`sources`: those that `setting` names, each a Source. `tools`: schemas that the prompt tells the policy of.
        `needs`: what metrics and users need of tasks under the settings of a source.

        Raises ConfigError, and ValueError naming setting, file and row for what cannot be read.
        """
        stage = config.train.stage
        self._config, self._tools, self.setting = config, tools, setting
        self._renderer: ChatRenderer | None = None
        self._folder = Path(config.run.dir) / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sources = list(sources)
        self.sets: list[Examples[Read]] = []
        self.fingerprints: list[str] = []  # of each source: what its rows are, and how they become tokens
        self.surveys: list[Survey] = []
        for source in self.sources:
            load: Any = {"rl": load_tasks, "sft": load_conversations, "dpo": load_pairs}[stage]
            examples: Examples[Any] = load(source, setting, config.data, self._folder)
            if stage == "rl" and config.data.prefixes and setting == "data.train":
                examples = at_every_depth(examples)
            if stage == "dpo" and FORMATS[examples.format].pair is None:
                examples = paired(examples)
            # A prompt needs room for a token of the reply.
            found = self._survey(examples, self._room() - int(stage == "rl"), needs(self.settings(source)))
            examples.leave_out(found.left_out)
            require(
                len(examples) > 0, f"{setting}={source.source}: all rows are left out: {_counts(found)}; give others"
            )
            self.sets.append(examples)
            self.surveys.append(found)

    def lines(self) -> list[str]:
        """For each source how many rows are taken, how they are read and why, what is left out, and which users its
        rows wish for in vain."""
        found = []
        for examples, one in zip(self.sets, self.surveys, strict=True):
            read = f"{len(examples)} rows, read as {examples.format} ({examples.why})"
            left_out = f"; left out: {_counts(one)}" if one.left_out else ""
            shares = "".join(_share(setting, counts, len(examples)) for setting, counts in one.lacking.items())
            where = f"{self.setting}={examples.source.source}"
            found.append(f"{where}: {read}{left_out}{shares}")
            found += [f"{where}: {said}" for said in (one.repeated, *unread(examples.source, self._config)) if said]
            there = self._config.users
            wishes = [user[:-1] for user in one.users if user.endswith("?") and not self._config.user.name]
            for wish in (wish for wish in wishes if wish not in there):
                found.append(f"{where}: rows wish for the user {wish}, which users lacks{nearest(wish, there)}")
        return found

    def settings(self, source: Any) -> Config:
        """The settings under which the conversations about a source's tasks are played."""
        return settings_of(self._config, source) if isinstance(source, EvaluationSet) else self._config

    def _room(self) -> int:
        """Tokens that a conversation may have: rollout.context_length, or fewer where the model has fewer positions."""
        context = self._config.rollout.context_length
        if self._config.assistant.model:
            return context
        described = hub.folder(self._config.model.path) / "config.json"
        positions = json.loads(described.read_text()).get("max_position_embeddings") if described.is_file() else None
        return min(context, positions or context)

    def _survey(self, examples: Examples[Read], longest: int, needs: Needs) -> Survey:
        """That of an earlier process of the run, unless rows, reader, tokenizer or what `needs` follow from changed."""
        fingerprint = getattr(examples.rows, "fingerprint", None)
        if fingerprint is None:  # tasks of a reader of the user's own, which are in memory
            return self._new_survey(examples, longest, needs)
        changed = tokenizer_files(hub.folder(self._config.model.path))
        prompt = [self._tools, self._config.model.chat_template_args, system_prompt(self._config)]
        asked = [sorted(needs.lacks), needs.decides]
        of = [fingerprint, examples.use, examples.format, longest, changed, prompt, asked, __version__]
        key = hashlib.blake2b(json.dumps(of, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.fingerprints.append(key)
        file = self._folder / f"survey-{key}.json"
        with FileLock(self._folder / f".{file.name}.lock"):  # ranks that were started by hand ask at once
            if not file.is_file():
                files.replace(file, json.dumps(asdict(self._new_survey(examples, longest, needs))))
        return Survey(**json.loads(file.read_text()))

    def _new_survey(self, examples: Examples[Read], longest: int, needs: Needs) -> Survey:
        if self._config.assistant.model:  # which itself refuses what is too long
            return survey(examples, longest, lambda messages: 0, lambda example: 0, needs)
        renderer = self._renderer = self._renderer or policys(self._config, self._tools)

        def tokens(example: Any) -> int:
            if isinstance(example, Task):
                return len(renderer.first(example.messages))
            return max(len(sample.token_ids) for sample in samples_of(renderer, example))

        def at_most(example: Any) -> int:
            if isinstance(example, Pair):
                return max(map(at_most, conversations(example)))
            messages = example.messages if isinstance(example, Task) else example
            if all(message.role == "system" for message in messages):
                return 0  # the user opens it, and no template renders nothing
            written = isinstance(messages, ToolConversation)  # what the template makes of calls is known in full only
            return sys.maxsize if written else renderer.at_most(messages)

        return survey(examples, longest, at_most, tokens, needs)


class TrainingData[Read](SurveyedSources[Read]):
    """data.train by position in the run, mixed as its sources say; a function of (run.seed, position) alone."""

    def __init__(
        self,
        config: Config,
        tools: Sequence[Mapping[str, Any]] = (),
        needs: Callable[[Config], Needs] = lambda config: Needs(),
    ) -> None:
        super().__init__(config, "data.train", sources(config.data.train, "data.train", TrainingSource), tools, needs)
        pairs = list(zip(self.sources, self.sets, strict=True))
        keys = [examples.sort_keys(source.sort_by) if source.sort_by else None for source, examples in pairs]
        per_step = config.train.prompts_per_step
        self._mixture = Mixture(self.sources, [len(examples) for examples in self.sets], per_step, keys)
        empty = self._mixture.empty_step(config.train.steps, per_step)
        require(empty is None, f"data.train: no source has rows for step {empty}; change from_step or until_step")

    def at(self, position: int, seed: int) -> Read:
        """The example at a position: step * train.prompts_per_step + its number in the step."""
        source, row = self._mixture.place(position, seed)
        return self.sets[source][row]


class SupervisedData:
    """Batches of data.train by step, from (run.seed, step) alone, and the sets of data.eval; the same on every rank.

    Of conversations (sft), each a sample, or of pairs (dpo), each two: the chosen one, then the rejected one.
    """

    def __init__(self, config: Config) -> None:
        self.renderer = policys(config)
        self.examples = TrainingData[Messages | Pair](config)
        sets = evaluation_sets(config)
        given = SurveyedSources[Messages | Pair](config, "data.eval", sets)
        self._sets = dict(zip(sets, given.sets, strict=True))
        self.seed, self.size = config.run.seed, config.train.prompts_per_step
        # Equal ones mean that `whole` has the same batches.
        self.fingerprint = [*self.examples.fingerprints, *given.fingerprints, *(one.tasks for one in sets)]

    def batch(self, step: int) -> Batch:
        return self._batch(self.examples.at(at, self.seed) for at in range(step * self.size, (step + 1) * self.size))

    def validation(self, one: EvaluationSet) -> Iterator[Batch]:
        """The examples of a set, in its order, as many at a time as a step has."""
        return self._batches(self._sets[one][: one.tasks], self.size)

    def __len__(self) -> int:
        """Examples of data.train and of the sets of data.eval."""
        return sum(map(len, self.examples.sets)) + sum(len(self._sets[one][: one.tasks]) for one in self._sets)

    def whole(self, size: int) -> Iterator[Batch]:
        """All of data.train and of the sets of data.eval, source by source, `size` examples at a time."""
        for examples in self.examples.sets:
            yield from self._batches(examples, size)
        for one in self._sets:
            yield from self._batches(self._sets[one][: one.tasks], size)

    def _batches(self, examples: Sequence[Any], size: int) -> Iterator[Batch]:
        for start in range(0, len(examples), size):
            yield self._batch(examples[start : start + size])

    def _batch(self, examples: Iterable[Any]) -> Batch:
        return Batch(tuple(sample for example in examples for sample in samples_of(self.renderer, example)))


def samples_of(renderer: ChatRenderer, example: Messages | Pair) -> tuple[Sample, ...]:
    """A conversation as a sample, a pair as two, of which what follows the shared prompt is learned from."""
    if isinstance(example, Pair):
        return tuple(rendered(renderer, side, len(example.prompt)) for side in conversations(example))
    return (rendered(renderer, example),)


def rendered(renderer: ChatRenderer, messages: Sequence[Message], start: int = 0) -> Sample:
    """Token ids of a conversation with a loss on every assistant message, its end-of-turn token included, from message
    `start` on.

    Built from the pieces a rollout is built from, so that training and sampling see the same stream.
    """
    if isinstance(messages, ToolConversation):
        renderer = renderer.with_tools(messages.tools)
    mine = [i for i, message in enumerate(messages) if message.role == "assistant"]
    token_ids = renderer.first(messages[: mine[0]])
    mask = [0.0] * len(token_ids)
    for i, following in zip(mine, [*mine[1:], len(messages)], strict=True):
        reply = renderer.call(messages[i]) if messages[i].tool_calls else renderer.reply(messages[i].content)
        between = renderer.next(messages[i + 1 : following], reply) if i + 1 < len(messages) else ()
        token_ids += reply + between
        mask += [float(i >= start)] * len(reply) + [0.0] * len(between)
    loss_mask = np.array(mask, np.float32)
    return Sample(np.array(token_ids, np.int64), loss_mask, np.zeros_like(loss_mask))


def task_row(task: Task) -> dict[str, Any]:
    """A task as a row that `load_tasks` reads."""
    prompt = [message.as_dict() for message in task.messages]
    row = {"id": task.id, "prompt": prompt, "goal": task.goal, "answer": task.answer, "user": task.user}
    return row | ({"metadata": dict(task.metadata)} if task.metadata else {})


def conversation_row(messages: Sequence[Message]) -> dict[str, Any]:
    """A conversation as a row that `load_conversations` reads; arguments and schemas as JSON, for Arrow's columns."""
    rows = [message.as_dict() for message in messages]
    for call in (call for row in rows for call in row.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    tools = messages.tools if isinstance(messages, ToolConversation) else ()
    return {"messages": rows} | ({"tools": json.dumps(tools)} if tools else {})


def pair_row(pair: Pair) -> dict[str, Any]:
    """A pair as a row that `load_pairs` reads."""
    parts = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
    row: dict[str, Any] = {name: conversation_row(part)["messages"] for name, part in parts.items()}
    if pair.scores:
        row |= {"score_chosen": pair.scores[0], "score_rejected": pair.scores[1]}
    return row | ({"tools": json.dumps(pair.tools)} if pair.tools else {})


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def to_parquet(file: Path) -> Path:
    """The rows of a file of JSON lines as Parquet beside it, in its place."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    with file.open() as lines:
        rows = Dataset.from_list([json.loads(line) for line in lines], on_mixed_types="use_json")
    written = file.with_suffix(".parquet")
    rows.to_parquet(written)
    file.unlink()
    return written


def _share(setting: str, lacking: Mapping[str, int], rows: int) -> str:
    why = ", ".join(f"{count} lack {what}" for what, count in lacking.items())
    return f"; {setting}: for {rows - sum(lacking.values())} of {rows} rows ({why})"


def _counts(found: Survey) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
