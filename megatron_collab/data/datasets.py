"""The data of a run: the sources of data.train and data.eval, surveyed; their order; the batches of SFT and DPO.

Surveys are stored in run.dir/data, beside the rows as Arrow: one process reads the data, the others reuse the result.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from megatron_collab import __version__
from megatron_collab.data.candidates import pairs_of_candidates
from megatron_collab.data.chat_template import ChatRenderer, tokenizer_files
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.examples import Examples, TaskReader, load_conversations, load_pairs, load_tasks
from megatron_collab.data.formats import FORMATS
from megatron_collab.data.length import certainly_longer
from megatron_collab.data.messages import Messages, Row, ToolConversation
from megatron_collab.data.mixture import Mixture
from megatron_collab.data.pairs import Pair, conversations
from megatron_collab.data.prefixes import at_every_depth
from megatron_collab.data.sources import Source, TrainingSource, unread_settings, unused_mixture
from megatron_collab.data.spec import DataSpec
from megatron_collab.data.survey import Survey, TaskRequirements, survey
from megatron_collab.runtime import files, hub
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import nearest, require
from megatron_collab.settings.documents import parse_settings
from megatron_collab.types import Batch, Message, Sample, Task

__all__ = ["TaskReader"]  # the interface for extensions
FOLDER = "data"  # in run.dir


class SurveyedSources[Read]:
    """The sources of data.train or data.eval (`setting`), and in `sets` the examples that the run takes of each.

    Tasks for rl, conversations for sft, pairs for dpo. Examples longer than rollout.context_length are left out.
    """

    def __init__(
        self,
        data: DataSpec,
        setting: str,
        sources: Sequence[Any],  # of Source
        tools: Sequence[Mapping[str, Any]] = (),
        requirements: Callable[[Source], TaskRequirements] = lambda source: TaskRequirements(),
        renders: bool = True,
    ) -> None:
        """`tools`: schemas shown to the policy. `requirements`: what metrics, users and tools require of the tasks of a
        source. `renders`: whether model.path reads the examples, in tokens; an endpoint refuses what is too long.

        Raises ConfigError, and ValueError naming setting, file and row if the data cannot be read.
        """
        self._data, self._tools, self.setting, self._renders = data, tools, setting, renders
        self._renderer: ChatRenderer | None = None
        self._folder, stage = data.run_dir / FOLDER, data.stage
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sources = list(sources)
        self.sets: list[Examples[Read]] = []
        self.fingerprints: list[str] = []  # of each source: of its rows and of how they are tokenized
        self.surveys: list[Survey] = []
        for source in self.sources:
            required = requirements(source)
            load: Any = {"rl": load_tasks, "sft": load_conversations, "dpo": load_pairs}[stage]
            reading = {"calls_reader": required.in_child} if stage == "rl" else {}  # ranks take what the start has read
            examples: Examples[Any] = load(source, setting, data.format, self._folder, **reading)
            if data.prefixes and setting == "data.train" and stage == "rl":
                examples = at_every_depth(examples)
            if stage == "dpo" and FORMATS[examples.format].pair is None:
                examples = pairs_of_candidates(examples)
            result = self._survey(examples, self._longest(), required)
            examples.leave_out(result.left_out)
            message = f"{setting}={source.source}: all rows are left out: {_counts(result)}; give others"
            require(len(examples) > 0, message)
            self.sets.append(examples)
            self.surveys.append(result)

    def lines(self) -> list[str]:
        """Log lines per source: rows taken, their format and why, rows left out, requested users that do not exist."""
        lines = []
        for examples, result in zip(self.sets, self.surveys, strict=True):
            read = f"{len(examples)} rows, read as {examples.format} ({examples.why})"
            left_out = f"; left out: {_counts(result)}" if result.left_out else ""
            shares = "".join(_share(setting, counts, len(examples)) for setting, counts in result.lacking.items())
            where = f"{self.setting}={examples.source.source}"
            lines.append(f"{where}: {read}{left_out}{shares}")
            unscorable = [
                f"{setting}: gives {count} of {tried} tasks tried no score; {example}"
                for setting, (count, tried, example) in result.unscorable.items()
            ]
            notes = (result.repeated, result.unread, result.forged, *unscorable, *self._notes(examples.source))
            lines += [f"{where}: {note}" for note in notes if note]
            users = self._data.users or ()
            requested = [user[:-1] for user in result.users if user.endswith("?") and self._data.users is not None]
            for user in (user for user in requested if user not in users):
                lines.append(f"{where}: rows name the user {user}, which users lacks{nearest(user, users)}")
        return lines

    def _notes(self, source: Any) -> list[str]:
        """Messages about settings of a source that have no effect."""
        return unread_settings(source, self._data.format.name)

    def _longest(self) -> int:
        """Maximum tokens of an example; a task's prompt needs room for a token of the reply."""
        if self._data.stage != "rl":
            return self._room()
        room = self._room() - 1
        return min(room, self._data.max_prompt_tokens or room)

    def _room(self) -> int:
        """Maximum tokens of a conversation: rollout.context_length, or the model's positions if these are fewer."""
        context = self._data.context_length
        if not self._renders:
            return context
        file = hub.folder(self._data.prompt.model) / "config.json"
        positions = parse_settings(files.read_text(file)).get("max_position_embeddings") if file.is_file() else None
        return min(context, positions or context)

    def _survey(self, examples: Examples[Read], longest: int, requirements: TaskRequirements) -> Survey:
        """The survey of an earlier process, unless rows, reader, tokenizer or requirements changed."""
        tokenizer = tokenizer_files(hub.folder(self._data.prompt.model))
        prompt = [self._tools, self._data.prompt.arguments, self._data.prompt.system]
        requirements_key = [sorted(requirements.settings), requirements.depends_on]
        reader = [examples.rows.fingerprint, examples.use, examples.format, longest]
        identity = [*reader, tokenizer, prompt, requirements_key, __version__]
        key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.fingerprints.append(key)
        file = self._folder / f"survey-{key}.json"
        with FileLock(self._folder / f".{file.name}.lock"):  # ranks started by hand call this concurrently
            stored = _stored_survey(file)
            if stored is None:
                files.replace(file, json.dumps(asdict(self._new_survey(examples, longest, requirements))))
                stored = _stored_survey(file)
        assert stored
        return stored

    def _new_survey(self, examples: Examples[Read], longest: int, requirements: TaskRequirements) -> Survey:
        if not self._renders:
            return survey(examples, longest, lambda messages: 0, lambda example: 0, requirements)
        renderer = self._renderer = self._renderer or self._data.prompt.renderer(self._tools)

        def tokens(example: Any) -> int:
            texts = conversations(example) if isinstance(example, Pair) else [getattr(example, "messages", example)]
            if any(certainly_longer(renderer, messages, longest) for messages in texts):
                return longest + 1
            if isinstance(example, Task):
                return len(renderer.first(example.messages))
            return max(len(sample.token_ids) for sample in samples_of(renderer, example))

        def at_most(example: Any) -> int:
            if isinstance(example, Pair):
                return max(map(at_most, conversations(example)))
            messages = example.messages if isinstance(example, Task) else example
            if all(message.role == "system" for message in messages):  # the user opens it
                renderer.check_shown([*messages, Message("user", "x")])
                return 0  # a template cannot render an empty conversation
            written = isinstance(messages, ToolConversation)  # the template decides how long calls are
            return sys.maxsize if written else renderer.at_most(messages)

        def control_tokens(example: Any) -> int:
            if isinstance(example, Pair):
                return sum(map(control_tokens, conversations(example)))
            return renderer.control_tokens(getattr(example, "messages", example))

        return survey(examples, longest, at_most, tokens, requirements, control_tokens)


class TrainingData[Read](SurveyedSources[Read]):
    """data.train by position in the run, mixed as its sources say: a function of (run.seed, position).

    `steps`: of the run.
    """

    def __init__(
        self,
        data: DataSpec,
        tools: Sequence[Mapping[str, Any]] = (),
        requirements: Callable[[Source], TaskRequirements] = lambda source: TaskRequirements(),
    ) -> None:
        super().__init__(data, "data.train", data.train, tools, requirements)
        pairs = list(zip(self.sources, self.sets, strict=True))
        keys = [examples.sort_keys(source.sort_by) if source.sort_by else None for source, examples in pairs]
        self._mixture = Mixture(self.sources, [len(examples) for examples in self.sets], data.per_step, keys)
        rows = self._mixture.epoch_rows
        self.steps = steps_of(data.epochs, rows, data.per_step) if data.epochs else data.steps
        empty = self._mixture.empty_step(self.steps, data.per_step)
        require(empty is None, f"data.train: no source has rows for step {empty}; change from_step or until_step")

    def _notes(self, source: TrainingSource) -> list[str]:
        return [*super()._notes(source), *unused_mixture(source, len(self.sources) == 1, self.steps)]

    def lines(self) -> list[str]:
        data, lines = self._data, super().lines()
        if data.epochs:
            rows = f"{data.per_step} of the {self._mixture.epoch_rows:g} rows of a pass"
            lines.append(f"train.epochs={data.epochs:g}: {self.steps} steps of {rows}")
        return lines

    def at(self, position: int, seed: int) -> Read:
        """The example at a position: step * train.prompts_per_step + its index in the step."""
        source, row = self._mixture.place(position, seed)
        return self.sets[source][row]


def steps_of(epochs: float, rows: float, per_step: int) -> int:
    """Steps in which `per_step` rows at a time make `epochs` passes over `rows`, the last one filled up."""
    return max(1, ceil(round(epochs * rows / per_step, 6)))


class SupervisedData:
    """Batches of data.train by step, a function of (run.seed, step), and the sets of data.eval; equal on all ranks.

    sft: one sample per conversation. dpo: two samples per pair, the chosen one first.
    """

    def __init__(self, data: DataSpec) -> None:
        self.renderer, self.eval_sets = data.prompt.renderer(), data.eval_sets
        self.examples = TrainingData[Messages | Pair](data)
        evaluation = SurveyedSources[Messages | Pair](data, "data.eval", self.eval_sets)
        self._sets = dict(zip(self.eval_sets, evaluation.sets, strict=True))
        self.seed, self.size = data.seed, data.per_step
        # Equal fingerprints mean equal `all_batches`.
        counts = [eval_set.tasks for eval_set in self.eval_sets]
        self.fingerprint = [*self.examples.fingerprints, *evaluation.fingerprints, *counts]

    def batch(self, step: int) -> Batch:
        return self._batch(self.examples.at(at, self.seed) for at in range(step * self.size, (step + 1) * self.size))

    def validation(self, eval_set: EvaluationSet) -> Iterator[Batch]:
        """The examples of a set in its order, in batches of train.prompts_per_step."""
        return self._batches(self._sets[eval_set][: eval_set.tasks], self.size)

    def __len__(self) -> int:
        """Number of examples of data.train and of the sets of data.eval."""
        evaluated = (len(examples[: eval_set.tasks]) for eval_set, examples in self._sets.items())
        return sum(map(len, self.examples.sets)) + sum(evaluated)

    def all_batches(self, size: int) -> Iterator[Batch]:
        """All of data.train and of the sets of data.eval, source by source, `size` examples at a time."""
        for examples in self.examples.sets:
            yield from self._batches(examples, size)
        for eval_set, examples in self._sets.items():
            yield from self._batches(examples[: eval_set.tasks], size)

    def _batches(self, examples: Sequence[Any], size: int) -> Iterator[Batch]:
        for start in range(0, len(examples), size):
            yield self._batch(examples[start : start + size])

    def _batch(self, examples: Iterable[Any]) -> Batch:
        try:
            return Batch(tuple(sample for example in examples for sample in samples_of(self.renderer, example)))
        except ValueError as error:  # a row whose bytes alone have shown that it is short enough
            raise RunStopped(str(error)) from error


def samples_of(renderer: ChatRenderer, example: Messages | Pair) -> tuple[Sample, ...]:
    """The samples of an example: one of a conversation, two of a pair, with a loss after the prompt that they share."""
    if isinstance(example, Pair):
        return tuple(render_sample(renderer, side, len(example.prompt)) for side in conversations(example))
    return (render_sample(renderer, example),)


def _stored_survey(file: Path) -> Survey | None:
    """The survey of an earlier process; None if there is none, or only a part of one, as after a power loss."""
    try:
        return Survey(**json.loads(file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def render_sample(renderer: ChatRenderer, messages: Sequence[Message], start: int = 0) -> Sample:
    """Token ids (int64) of a conversation, and a loss mask (float32): 1 on every trained message of the assistant from
    message `start` on, its end-of-turn token included.

    Built from the same pieces as a rollout, so that training and sampling see the same tokens.
    """
    if isinstance(messages, ToolConversation):
        renderer = renderer.with_tools(messages.tools)
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    token_ids = renderer.first(messages[: replies[0]])
    mask = [0.0] * len(token_ids)
    for i, following in zip(replies, [*replies[1:], len(messages)], strict=True):
        reply = renderer.call(messages[i]) if messages[i].tool_calls else renderer.reply(messages[i].content)
        between = renderer.next(messages[i + 1 : following], reply) if i + 1 < len(messages) else ()
        token_ids += reply + between
        mask += [float(i >= start and messages[i].trained)] * len(reply) + [0.0] * len(between)
    loss_mask = np.array(mask, np.float32)
    return Sample(np.array(token_ids, np.int64), loss_mask, np.zeros_like(loss_mask))


def task_row(task: Task) -> dict[str, Any]:
    """A task as a row that `load_tasks` reads."""
    prompt = [message.as_dict() for message in task.messages]
    row = {"id": task.id, "prompt": prompt, "goal": task.goal, "answer": task.answer, "user": task.user}
    return row | ({"metadata": dict(task.metadata)} if task.metadata else {})


def conversation_row(messages: Sequence[Message]) -> dict[str, Any]:
    """A conversation as a row that `load_conversations` reads; arguments and schemas as JSON, for Arrow's columns."""
    rows = [message.as_dict() | ({} if message.trained else {"weight": 0}) for message in messages]
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
    """Replaces a JSONL file by a Parquet file of the same rows, beside it."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    with file.open() as lines:
        rows = Dataset.from_list([json.loads(line) for line in lines], on_mixed_types="use_json")
    written = file.with_suffix(".parquet")
    rows.to_parquet(written)
    file.unlink()
    return written


def _share(setting: str, lacking: Mapping[str, int], rows: int) -> str:
    why = ", ".join(f"{count} lack {requirement}" for requirement, count in lacking.items())
    return f"; {setting}: for {rows - sum(lacking.values())} of {rows} rows ({why})"


def _counts(result: Survey) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in result.dropped.items())
