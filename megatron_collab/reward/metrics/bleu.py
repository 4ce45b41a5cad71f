"""Similarity of the conversation's document to the task's reference, by sentence BLEU-4."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import sacrebleu

from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import Metric, judges_prompt
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Missing, Score, Task

_FIELDS = (Field("document", str, help="the document"),)


class Bleu(Metric):
    """From 0 to 1: sacrebleu's sentence BLEU, or BLEU over characters as in the published code (`character_bleu`)."""

    ground_truth = True

    @dataclass(frozen=True)
    class Options:
        level: str = option("token", "unit of the n-grams", choices=("token", "character"))
        extract: bool = option(True, "a judge extracts the document; false: use the policy's last reply")
        model: str | None = option(None, "LiteLLM model of the judge; null: reward.judge.model")
        prompt: str | None = option(None, "FILE.j2: the extraction prompt of the judge; null: the built-in one")

        def __post_init__(self) -> None:
            judges_prompt(self.prompt, "bleu")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return options.extract

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.answer else "an answer"

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        document = conversation.replies[-1] if conversation.replies else ""
        if self.options.extract:
            answer = await self.ask_judge(judges_prompt(self.options.prompt, "bleu"), task, conversation, _FIELDS)
            if isinstance(answer, Missing):
                return answer
            document = answer["document"]
        if self.options.level == "character":
            return character_bleu(document, task.answer)
        return sacrebleu.sentence_bleu(document, [task.answer]).score / 100


def character_bleu(document: str, reference: str) -> float:
    """BLEU-4 over characters without smoothing, from 0 to 1: brevity * (p_1 p_2 p_3 p_4)^(1/4), as NLTK on strings.

    p_n is the clipped n-gram precision of the document against the reference; brevity is
    min(1, exp(1 - |reference| / |document|)) (Papineni et al., 2002). Without a match the result is 0 (NLTK: < 1e-70).
    """
    precisions = []
    for order in range(1, 5):
        written, expected = _ngrams(document, order), _ngrams(reference, order)
        if not (matches := (written & expected).total()):
            return 0.0
        precisions.append(matches / written.total())
    brevity = min(1.0, math.exp(1 - len(reference) / len(document)))
    return brevity * math.prod(precisions) ** (1 / 4)


def _ngrams(text: str, order: int) -> Counter[str]:
    return Counter(text[start : start + order] for start in range(len(text) - order + 1))
