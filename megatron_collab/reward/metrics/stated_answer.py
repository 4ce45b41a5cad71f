"""The answer that a conversation surely states: the one place that decides it, from the text of the policy's replies.

1. Where it stands. In a reply, the last of: a box; a line after "####"; a sentence that says what "the answer" is; a
   conclusion ("so", "in total", or a sentence about "it" or "the result") that ends in "is", "=", "has" and a value.
   Sentences that ask count for nothing, and neither do those that begin with a hedge, a condition or a check.
2. How sure it is. All that follows the verb up to the end of the sentence is the answer ("at least 5", "5 million"), so
   it is compared as a whole (equality.py). A box is all of its formula, but for "x =" before it, behind a verb, and
   punctuation or a unit follows it. Hedges within the subject ("the number of possible values is") change nothing.
3. What may follow. Questions, offers, checks that deny nothing, and a closing; of a marked answer (box, "####",
   "answer") also sentences with numbers, if the last repeats the answer's. A reply that takes something back withdraws
   all before it.
4. Which reply. The last one, or the one before a closing such as "You're welcome!".

Whatever is stated in another way, e.g. in a plain sentence without a conclusion, is not surely stated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_collab.data.answers import LONGEST, boxed, marked_line


def _any_of(*phrases: str) -> re.Pattern[str]:
    """Matches any of the phrases (patterns) as whole words; those of scripts without spaces anywhere."""
    return re.compile("|".join(phrase if phrase[0] > "\u2e80" else rf"\b{phrase}\b" for phrase in phrases), re.I)


_NUMBER = re.compile(
    r"\d|\b(?:zero|none|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|fif)ty|dozen)\b",
    re.I,
)

# Sentences that state nothing.
_ASKS = re.compile(r"[?\uff1f][^\w?]*$")
_OFFERS = _any_of(
    *("let me know", "feel free", "tell me", "happy to", "glad to", "shall (?:i|we)", "should (?:i|we)", "want to"),
    *("want me to", "would you", "i (?:can|could|will|would) (?:also|then|help|show|explain|draw|give you|go)"),
    *("next steps?", "if you (?:had|like|want|prefer|need)", "you (?:can|could)", "we (?:can|could)"),
)
_ASIDE = re.compile(
    r"^\W*(?:(?:let's |let us |let me |to |a |quick )*(?:(?:double-?)?check|verif\w*|sanity|proof|probe|zur probe)"
    r"|you (?:asked|said|wrote)|for (?:comparison|example|instance)|note|remember)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(  # at the beginning of a clause
    r"^\W*(?:(?:and|but|so|then|well|also|therefore|thus|hence),? )*"
    r"(?:maybe|perhaps|possibly|probably|if|unless|suppose|assum(?:ing|e)|whether|not|someone|some|many|a common|let"
    r"|that the|say|i (?:guess|first|thought|believe|doubt|suspect|am not)|i'm not|one (?:might|could|may)|what if"
    r"|imagine|you (?:said|asked|wrote)|vielleicht|wenn|falls|tal vez|quiz\S+|si|peut-\S+)\b",
    re.IGNORECASE,
)
_WITHDRAWS = _any_of(
    *("wait(?! for)", "hold on", "scratch that", "oops", "i meant", "good catch", "i forgot", "correction(?=:)"),
    *("my mistake", "made an? (?:mistake|error)"),
    "let me (?:redo|correct|fix|recalculate|recompute|reconsider|revise|start)",
    "(?:that|this|it|i)(?: is| was| am|'s|'m) (?:wrong|incorrect|mistaken|a (?:mistake|slip)|not (?:right|correct))",
    "(?:that|this|it) does(?:n't| not) (?:seem|look|sound) (?:right|correct)",
    *(r"apologi[sz]e", r"(?<!\w )actually", "(?:that|this|it) can(?:'t|not) be right", "start (?:again|over)", "sorry"),
    *("not true", "das (?:ist|war) falsch", "moment", "espera", "perd\u00f3n", "lo siento", "es incorrecto"),
    *("不对", "错了", "抱歉"),
)
_CLOSES = _any_of(
    *("welcome", "glad", "happy", "pleasure", "no problem", "any ?time", "good luck", "great day", "bye"),
    *("good question", "take care", "have fun", "enjoy", "congratulations", "well done", "hope (?:this|it)", "gern"),
    *("de nada", "不客气"),
)

# Sentences that state an answer.
_END = r"(?!-?[^\W\d_\u2e80-\U0010ffff])"  # of a word in Latin letters: another letter does not follow
_SO = (
    r"(?:(?:and|but|so|therefore|thus|hence|then|finally|altogether|overall|in total|in all|in conclusion|in summary"
    rf"|all in all|also|daher|entonces|por lo tanto|donc){_END}"
    r"|所以|因此|那么)"
)
_START = rf"^\W*(?:{_SO}[,:]?\s*)*"
_WHOSE = r"(?:(?:i think |we see |we conclude |this means |which means )?(?:that )?(?:the|my|our)\s+)?"
_ADJECTIVES = r"(?:(?:final|correct|right|exact|numerical|required|desired|overall|total|whole|simplified)\s+)*"
_OF_TASK = r"(?:\s+(?:to|for|of) (?:the|this|your) (?:problem|question|exercise|task))?"
_ANSWER = re.compile(  # group 1 comes before the subject, the other one that matches is the answer
    rf"{_START}(?:([^,=]{{0,80}}),\s+)?(?:"
    rf"{_WHOSE}{_ADJECTIVES}(?:answer|option|choice|solution(?! *:))\b{_OF_TASK}[\s*]*"
    rf"(?:(?:is|are|stays|remains){_END}|:|=)+(?:\s+(?:indeed|therefore|thus|simply|just)\b)?(.*)"
    r"|(?:(?:die|das) )?(?:richtige |endg\u00fcltige )?(?:antwort|ergebnis|l\u00f6sung(?! *:))"
    rf"\s*(?:(?:ist|lautet|betr\u00e4gt){_END}|:)+(?:\s+(?:also|daher|somit)\b)?(.*)"
    r"|(?:(?:la|el) )?(?:respuesta|resultado|soluci\u00f3n(?! *:)|r\u00e9ponse)(?: correcta| final| finale| correcte)?"
    rf"\s*(?:(?:est|es){_END}|:)+(?:\s+donc\b)?(.*)"
    r"|(?:最终|正确)?答案(?:是|为|\s*[:=])(.*)"
    r"|คำตอบ(?:สุดท้าย|ที่ถูกต้อง)?\s*(?:คือ|เท่ากับ|[:=])(.*)"
    r"|答えは(.*?)(?:です|である)?\W*$)",
    re.IGNORECASE | re.DOTALL,
)
_VERB = r"(?:is|are|was|equals?|has|have|had|gets?|makes?|pays?|earns?|needs?|=)(?: a total of)?"
_CONCLUDES = re.compile(
    rf"^\W*(?:{_SO}[,:]?\s*)+(?P<subject>(?:[^=]*?\W)??)(?P<verb>{_VERB})(?P<value>(?:\W.*))$"
    r"|^\W*(?P<it>it|that|this|the (?:final )?(?:result|total|sum|value))(?:'s| (?:is|equals|makes))(?P<of_it>\W.*)$",
    re.IGNORECASE | re.DOTALL,
)
_OF_A_PART = _any_of(  # subjects of which something is stated that is no answer
    *("first", "second", "third", "part", "one", "each", "step", "other", "another", "half", "rest", "remaining"),
    *("previous", "next", "last", "earlier", "far", "said", "example", "factors?", "exercise", "page", "problem"),
    *("wrong", "incorrect", "depends?", "unknown", "if", "unless", "suppose", "when", "while", "whether", "let"),
    *("case", r"for \d+", "you", "your", "year", "chapter", "guess", "maybe", "perhaps", "probably", "estimate", "not"),
    *("never", "without", "before", "instead"),
)
_LEADS_TO_BOX = re.compile(  # the end of the text before a box
    r"(?:^|[:=,#]|\b(?:is|are|was|be|equals?|to|gets?|obtain|gives?|yields?|have|has|therefore|thus|hence|so|then|answer"
    r"|find|conclude|that|there|makes?|of|needs?|pays?|earns?|ist|lautet|es|est|sind|son)|[是为]|答えは)[\s$\\(\[{*]*$",
    re.IGNORECASE,
)
_DENIES = _any_of(
    *("(?:can)?not", r"\w+n't", "maybe", "perhaps", "possibly", "if", "suppose", "might", "could", "may", "least"),
    *("most", "whether", "negative", "minus", "none", "neither", "never", "nobody", "wrong", "incorrect", "impossible"),
    *("errors?", "fails?", "too", r"contradict\w*", "bound", "roughly", "approximately", "nicht", "kein", "nunca"),
    *("vielleicht", "no (?:es|son)", "quiz\u00e1s?", "不", "可能", "也许"),
)
_AFTER_BOX = re.compile(
    r"(?:[\s$\\)\]}.,;:*。]|!(?![\s}]*(?:\$|\\[)\]])))*(?:(?:is|as) (?:the|our|my) (?:final |correct )?answer\W*)?"
)
_REMARK = re.compile(r"\w\s+\([^$\\]*$")  # a bracket in plain text, which multiplies nothing
_OF_A_FORMULA = re.compile(r"(?:^|[^\\])(?:\$\$?|\\\(|\\\[)(?P<inner>(?:[^$\\]|\\[^()\[\]])*)$")

_UNBROKEN = re.compile(
    rf"\$\$.{{1,{LONGEST}}}?\$\$|\\\[.{{1,{LONGEST}}}?\\\]|\\begin\{{(\w+\*?)\}}.{{1,{LONGEST}}}?\\end\{{\1\}}",
    re.DOTALL,
)
_BOUNDARY = re.compile(  # of sentences, and of offers within one
    r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?][\"'\u201d)*_$\\\]]*(?P<gap>\s+)(?!m\b|am\b|pm\b)|(?<=[。！？])(?P<cjk>\s*)|\n|;(?!\\)"
    r"|[,\u2013\u2014]?\s+-{0,2}\s*(?=(?:would you|do you|want me|let me know|feel free|tell me)\b)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",\s+(?=(?:but(?=[^,]*\banswer)|so|therefore|thus|hence|then|which means)\b)", re.IGNORECASE)
_BLANKS = re.compile(r"\s{2,}|[^\S\n ]")
_PLAIN = str.maketrans({"\u2019": "'", "\uff0c": ",", "\uff1a": ":"})


class Reading(NamedTuple):
    """What a reply states: an answer, or None; whether it takes earlier answers back, and only closes the talk."""

    answer: str | None
    withdraws: bool
    closes: bool


def stated_answer(replies: Sequence[str]) -> str | None:
    """The answer that the replies surely state, by the rules above; None if there is none or it is not sure."""
    for reply in reversed(replies):
        reading = _read(_BLANKS.sub(_one_blank, reply.translate(_PLAIN)).strip())
        if reading.answer is not None or reading.withdraws or not reading.closes:
            return reading.answer
    return None


def _one_blank(blanks: re.Match[str]) -> str:
    """One line feed or space for several, as patterns backtrack over these."""
    return "\n" if "\n" in blanks[0] else " "


def _read(reply: str) -> Reading:
    marked: str | None = None  # after a mark: box, ####, "answer"
    concluded: str | None = None
    unsure = withdraws = False
    for sentence in _sentences(reply):
        if withdrawal := _WITHDRAWS.search(sentence):
            marked = concluded = None
            withdraws, unsure = True, False
            sentence = sentence[withdrawal.end() :]
        if _ASKS.search(sentence):
            continue
        if boxed(sentence):
            marked = _box(sentence)
            unsure = marked is None
        elif sentence.lstrip().startswith("####"):
            line = marked_line(sentence)
            if line and not re.search(r"[a-z]{3,} [a-z]{2,}", re.sub(r"\\\w+\{[^{}]*\}", "", line)):
                marked, unsure = line, False
        elif _ASIDE.search(sentence):
            unsure = unsure or bool((marked or concluded) and _DENIES.search(sentence))
        elif not _OFFERS.search(sentence):
            for clause in _CLAUSE.split(sentence):
                if len(clause) > 4 * LONGEST:  # patterns backtrack over it
                    unsure = True
                elif _HEDGED.search(clause):
                    unsure = unsure or marked is not None
                elif statement := _ANSWER.match(clause):
                    marked = _marked(statement)
                    unsure = not marked
                elif _NUMBER.search(clause):
                    concluded = _conclusion(clause)
                    unsure = unsure if marked is None else not _repeats(clause, marked)
                elif re.search(r"\w", clause) and not _CLOSES.search(clause):
                    concluded = _conclusion(clause)
                    unsure = unsure or marked is not None
    numberless = not (_NUMBER.search(reply) or boxed(reply))
    closes = numberless and len(reply.split()) <= 40 and _CLOSES.search(reply) is not None
    return Reading(None if unsure else marked or concluded, withdraws, closes)


def _marked(statement: re.Match[str]) -> str | None:
    """What a sentence says of "the answer", unless the words before that say that it is not the task's."""
    if statement[1] and _OF_A_PART.search(statement[1]):
        return None
    answer = next(group for group in statement.groups()[1:] if group is not None).strip(" :")
    return None if _REMARK.search(answer) else answer


def _repeats(clause: str, answer: str) -> bool:
    """Whether a clause, or the last side of an equation, has all numbers of an answer; of one without, all words."""
    sides = [text.rpartition("=")[2] for text in (answer, clause)]
    word = r"\d+(?:[.,]\d+)*" if re.search(r"\d", sides[0]) else r"[^\W\d_]+"
    needed, present = (set(re.findall(word, side)) for side in sides)
    return needed <= present and not _DENIES.search(clause)


def _conclusion(clause: str) -> str | None:
    statement = _CONCLUDES.match(clause)
    if not statement or _OF_A_PART.search(statement["subject"] or ""):
        return None
    value = statement["of_it"] or clause[statement.start("subject" if statement["verb"] == "=" else "value") :]
    if _REMARK.search(value) or (statement["it"] and not re.search(r"\d|[\\$]", value)):
        return None
    return value.strip()


def _box(sentence: str) -> str | None:
    """The only box of a sentence, if it is all of its formula and follows a verb or nothing."""
    boxes = [*re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", sentence)]
    content = boxed(sentence)
    before = sentence[: boxes[0].start()]
    after = sentence[boxes[-1].end() :].partition(content or "")[2]
    nested = len(boxes) > 1 and sentence[boxes[0].end() :].lstrip("{ ").startswith("\\boxed")
    if (len(boxes) > 1 and not nested) or _DENIES.search(before) or _HEDGED.search(before):
        return None
    unit = re.fullmatch(
        r"\}?(?:\$|\\\)|\s)*((?:(?:square|cubic) )?(?!(?:and|or)\b)[^\W\d_][^\s$\\{}]{0,40}?)[.*]*", after
    )
    if not (unit or _AFTER_BOX.fullmatch(after)):
        return None
    formula = _OF_A_FORMULA.search(before)
    inner = formula["inner"].strip() if formula else ""
    if inner and not re.search(r"(?<![<>!])=$", inner):
        return None
    if not (inner or _LEADS_TO_BOX.search(before)):
        return None
    return rf"{content} \text{{{unit[1]}}}" if unit else content


def _sentences(reply: str) -> Iterator[str]:
    """The sentences of a reply, without list and emphasis markup; a label and the line after it are one sentence."""
    text = _UNBROKEN.sub(lambda formula: " ".join(formula[0].split()), reply)
    text = re.sub(r"(?m)^[ \t]*(?:[-•*]|\d+[.)])[ \t]+(?=\S)", "", text).replace("`", "")
    text = re.sub(r"(?<![a-zA-Z0-9)])\*\*|\*\*(?![a-zA-Z0-9(])", "", text)  # no powers
    text = re.sub(r"(?i)(\banswer)[ \t]*\n\s*", r"\1: ", text)
    text = re.sub(r"(:|####)[ \t]*\n\s*", r"\1 ", text)
    begin = 0
    for boundary in _BOUNDARY.finditer(text):
        gap = "gap" if boundary["gap"] else "cjk" if boundary["cjk"] is not None else 0
        yield text[begin : boundary.start(gap)]
        begin = boundary.end()
    yield text[begin:]
