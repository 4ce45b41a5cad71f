"""Grade-school problems as conversations: the question comes first, the facts when they are asked for.

Made from the GSM8K files in data.path (train.jsonl and test.jsonl, rows of question and answer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.config import Config, ConfigError
from megatron_collab.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STOP = "[[TERMINATE CHAT]]"
VOCABULARY = 1024
EVAL_TASKS = 256

# A sentence ends at . ? or ! before white space, or at the end; a number's point has none behind it.
_SENTENCE = re.compile(r"\S.*?[.?!]+[\"')\]]*(?=\s|$)|\S.*$", re.DOTALL)
# Points that end no sentence, and what stands for them while the text is cut.
_ABBREVIATION = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|No|a\.m|p\.m|oz|lb|ft|in|approx)\.(?=\s+[a-z0-9A-Z])")
_POINT = "\u2024"
_ANSWERED = re.compile(r"\\boxed|####|\banswer\b.*\d", re.IGNORECASE | re.DOTALL)


def cut(problem: str) -> tuple[str, list[str]]:
    """The question (the last sentence that asks) and the facts (all other sentences, in order).

    A problem that is one sentence is all question.
    """
    hidden = _ABBREVIATION.sub(lambda match: match[0].replace(".", _POINT), problem.strip())
    sentences = [" ".join(match[0].replace(_POINT, ".").split()) for match in _SENTENCE.finditer(hidden)]
    asking = [i for i, sentence in enumerate(sentences) if "?" in sentence]
    at = asking[-1] if asking else len(sentences) - 1
    return sentences[at], sentences[:at] + sentences[at + 1 :]


def reply(goal: str, messages: Sequence[Message]) -> str:
    """The scripted user: one more fact for every message that asks, the end once an answer is stated."""
    text = messages[-1].content
    if _ANSWERED.search(text):
        return STOP
    if "?" not in text:
        return "Please ask me what you need to know, or tell me the answer."
    facts = json.loads(goal)["facts"]
    told = " ".join(message.content for message in messages if message.role == "user")
    return next((fact for fact in facts if fact not in told), "That is all I know.")


def tasks(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a task file, one a problem; the answer is the number behind ####."""
    for i, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        question, facts = cut(row["question"])
        yield {
            "id": f"{file.stem}-{i}",
            "prompt": [{"role": "user", "content": question}],
            "goal": json.dumps({"question": question, "facts": facts}),
            "answer": row["answer"].rsplit("####", 1)[1].strip().replace(",", ""),
            "user": "gsm8k",
        }


def make(folder: Path, config: Config) -> None:
    """Write model/ (random, from run.seed; for trying things out), train.jsonl and eval.jsonl."""
    from megatron_collab.data.worlds import tiny, write_rows

    source = Path(config.data.path or "")
    for name in ("train.jsonl", "test.jsonl"):
        if config.data.path is None or not (source / name).is_file():
            raise ConfigError(f"data.path={config.data.path}: no {name} there; give the folder with the GSM8K files")
    rows = list(tasks(source / "train.jsonl"))
    texts = [row["goal"] for row in rows]
    tiny.save_model(folder / "model", tokenizer(texts), config.run.seed, max_positions=2048)
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "eval.jsonl", list(tasks(source / "test.jsonl"))[:EVAL_TASKS])


def tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens, trained on `texts`."""
    from megatron_collab.sglang_cpu import parts

    parts.install()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    model.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<|pad|>", eos_token="<|end|>")
    fast.chat_template = (
        "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    return fast
