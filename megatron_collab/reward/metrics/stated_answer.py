"""The answer that a conversation surely states: the one place that decides it, from the text of the policy's replies.

1. Where it stands. In a reply, the last of: a box; a line after "####"; a sentence that says what "the answer" is; a
   conclusion ("so", "in total", or a sentence about "it" or "the result") that ends in "is", "=", "has" and a value.
   Sentences that ask count for nothing, and neither do those that begin with a hedge, a condition or a check, nor
   struck text.
2. How sure it is. All that follows the verb up to the end of the sentence is the answer ("at least 5", "5 million"), so
   it is compared as a whole (equality.py). A box is all of its formula, but for "x =" before it, behind a verb or a
   label ("Total cost:"), and punctuation or a unit follows it. Hedges within the subject ("the number of possible
   values is") change nothing.
3. What may follow. Questions; offers, which begin as such and have no numbers but the answer's and those of steps and
   the like; a closing; thanks; and whatever ends in the answer again, as a check or working may. All else makes it
   unsure, e.g. other numbers and remarks. A reply that takes something back withdraws all before it.
4. Which reply. The last one, or the one before a reply of nothing but closings ("You're welcome!") and offers.

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


_DIGITS = r"(?:(?<![\w)])[-\u2212])?\d+(?:[.,]\d+)*"
_NUMBER = re.compile(
    rf"{_DIGITS}|\b(?:zero|none|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen"
    r"|(?:twen|thir|fif)ty|dozen)\b",
    re.I,
)
_WORD = re.compile(r"[^\W\d_]+")

# Sentences that state nothing.
_ASKS = re.compile(r"[?\uff1f][^\w?]*$")
_IF_ASKED = (
    r"if (?:you(?:'d)? (?:like|want|prefer|need|have|run into)\b[^,=]{0,60}"
    r"|(?:anything|something) (?:is|isn't|remains) (?:still )?\w+)"
)
_OFFERS = re.compile(
    rf"^\W*(?:(?:and|or|also|so|please|just|otherwise|of course|{_IF_ASKED},)\s+)*"
    r"(?:let me know|feel free(?! to (?!(?:ask|reach|share|contact|let|tell|check|send|write|return|come)\b))"
    r"|don't hesitate|tell me|(?:do you )?want (?:me )?to|would you|(?:shall|should) (?:i|we)"
    r"|(?:(?:i'm|i am|i'd be|i would be|always) (?:\w+ )?)?(?:happy|glad) to (?:help|explain|show|walk|answer|solve)"
    r"|i(?:'ll| can| could| will| would) (?:(?:also|then|gladly) )*(?:help|show|explain|draw|give you|walk|solve"
    r"|work (?:it|this|that|through|out))|i(?:'m| am) (?:always )?here (?:to help|if you)"
    r"|(?:next steps?\W+)?try (?:it|this|another)|(?:is there )?anything else|do you (?:have|need|want)"
    r"|m\u00f6chtest du|soll ich|quieres|algo m\u00e1s|veux-tu)\b",
    re.IGNORECASE,
)
_POLITE = re.compile(  # passed over: what _BOUNDARY leaves in front of an offer, and what precedes a closing
    rf"^\W*(?:(?:and|or|so|please|just)\b\W*)*"
    rf"(?:(?!if you.{{0,80}}\b(?:you|must|should)\b){_IF_ASKED}(?:, (?:please|just|then))?[^\w.!]*$"
    r"|(?:of course|great|sure|thanks|thank you(?: so much)?)?\W*$)",
    re.IGNORECASE,
)
_RESULT = re.compile(  # in an offer
    r"=|\b(?:we|i) (?:get|obtain|have|find)\b"
    r"|(?:\b(?:is|are|be|it|gives?|giving|makes?|making|leaves?|leaving|gets?|equals?|which|so|thus)"
    r"|'s)\W+"
    rf"(?:{_NUMBER.pattern})",
    re.IGNORECASE,
)
_COUNTED = re.compile(  # numbers in an offer that are no result
    r"\b(?:steps?|parts?|problems?|questions?|exercises?|methods?|examples?|pages?|the other"
    rf"|(?:see|show|explain|do|try|solve) (?:it|this|that) (?:for|with))\s+(?:{_NUMBER.pattern})"
    rf"|(?:{_NUMBER.pattern})\s+(?:(?:more|other) )?(?:steps|ways|methods|minutes|parts|problems|questions|examples)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(  # at the beginning of a clause: a hedge, a condition or a check
    r"^\W*(?:(?:and|but|so|then|well|also|therefore|thus|hence),? )*"
    r"(?:maybe|perhaps|possibly|probably|if|unless|suppose|assum(?:ing|e)|whether|not|someone|some|many|a common|let"
    r"|that the|say|i (?:guess|first|thought|believe|doubt|suspect|am not)|i'm not|one (?:might|could|may)|what if"
    r"|imagine|you (?:said|asked|wrote)|for (?:comparison|example|instance)|vielleicht|wenn|falls|tal vez|quiz\S+|si"
    r"|peut-\S+|(?:to |a |quick )*(?:(?:double-?)?check\w*|verif\w*|sanity|proof|zur probe|probe))\b",
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
_CLOSING = (
    r"(?:(?:you(?:'re| are) )?(?:(?:very|most|always|so) )?welcome|(?:it was )?(?:my|a) pleasure|no (?:problem|worries)"
    r"|(?:(?:i'm|i am) )?(?:(?:so|very|always) )?(?:glad|happy|pleased) (?:(?:to|(?:that )?i could)"
    r" (?:help|hear|assist|be of (?:help|service))"
    r"|(?:(?:that|it|this|everything) )+(?:help(?:s|ed)|makes sense|work(?:s|ed)|(?:is|was) (?:clear|helpful|useful)))"
    r"|(?:i )?hope (?:this|it|that)(?: answer| explanation)? (?:helps?|helped|clears?|clarifies|makes? sense"
    r"|(?:is|was) (?:correct|right|clear|helpful|useful))"
    r"|any ?time|good luck|have an? (?:great|nice|good|wonderful|lovely)|have fun|enjoy|(?:good)?bye|take care|see you"
    r"|congratulations|well done|(?:that's )?great to hear|happy (?:learning|studying)"
    r"|gern(?: geschehen)?|de nada|de rien|不客气)"
)
_TO_WHOM = (  # and for what; nothing else may follow a closing
    r"(?: at all| again| then| too| now| any ?time| so much| things(?: up)?| clarify| (?:to )?understand| day| evening"
    r"| week(?:end)?| (?:it|you|this|that|everything)| your(?: [^\W\d][\w'-]*){1,2}"
    r"| (?:with|for|on|in) (?:it|you|everything|(?:this|that|your|the|my)(?: [^\W\d][\w'-]*){0,2}))*"
)
_CLOSES = re.compile(
    rf"^\W*(?:(?:and|so|ok(?:ay)?|great|sure|perfect|of course|thanks|thank you)\W+)*{_CLOSING}{_TO_WHOM}"
    rf"(?:(?:,? and|,) {_CLOSING}{_TO_WHOM}|, [^\W\d]\w*)?\W*$",
    re.IGNORECASE,
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
    r"(?:^|[=,#]|(?:\b(?:is|are|was|be|equals?|to|gets?|obtain|gives?|yields?|have|has|therefore|thus|hence|so|then"
    r"|find|conclude|that|there|makes?|of|needs?|pays?|earns?"
    r"|(?:answer|solution|result|total|value|antwort|ergebnis|l\u00f6sung|respuesta|soluci\u00f3n|r\u00e9ponse)"
    r"(?: final\w*)?|ist|lautet|es|est|sind|son)|[是为]|答案|答えは):?)[\s$\\(\[{*]*$",
    re.IGNORECASE,
)
_LABEL = re.compile(  # of a box, before which nothing else stands
    r"^\W*(?:[^\W\d_][^\W\d_'-]*[ ]){0,5}(?:[^\W\d_\u2e80-\U0010ffff]+|by -?\d+)\s*:[\s$\\(\[{*]*$", re.IGNORECASE
)
_NO_LABEL = _any_of(
    *("i", "we", "he", "she", "they", "people", r"student\w*", r"reject\w*", r"discard\w*", r"exclud\w*"),
    *(r"ignor\w*", "about", "around", "nearly", "almost", "over", "under", "above", "below", "between", "than", "like"),
    *("say", "instance", "hint", "note", "format", "given", "input", r"intermediate\w*", "initial", "original", "old"),
    *(r"mistak\w*", "trap", r"tempt\w*", r"attempt\w*", "option", r"alternative\w*", r"compar\w*", "beispiel"),
    *("etwa", "ungef\u00e4hr", r"falsch\w*", "ejemplo", "aproximadamente", r"incorrect[ao]", "exemple", "environ"),
)
_DENIES = _any_of(
    *("(?:can)?not", r"\w+n't", "maybe", "perhaps", "possibly", "if", "suppose", "might", "could", "may", "least"),
    *("most", "whether", "negative", "minus", "none", "neither", "never", "nobody", "wrong", "incorrect", "impossible"),
    *("errors?", "fails?", "too", r"contradict\w*", "bound", "roughly", "approximately", "nicht", "kein", "nunca"),
    *("vielleicht", "no (?:es|son)", "quiz\u00e1s?", "不", "可能", "也许"),
)
_BEHIND_A_VERB = re.compile(rf"(?:^|\b{_VERB}|:)\W*(?:\\[a-z]+\W*)*$", re.IGNORECASE)
_CHANGES = re.compile(  # a number that is repeated
    r"%|\b(?:also|another|other|again|more|less|half|twice|double|times|percent|hundred|thousand|million)\b"
    r"|,\s*[^\W\d]",
    re.IGNORECASE,
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
_STRUCK = re.compile(rf"(?<!\S)~~(?!\s).{{1,{LONGEST}}}?~~(?!\w)|<(s|del|strike)>.{{1,{LONGEST}}}?</\1>", re.DOTALL)
_BOUNDARY = re.compile(  # of sentences, and of offers within one
    r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?][\"'\u201d)*_$\\\]]*(?P<gap>\s+)(?!m\b|am\b|pm\b)|(?<=[。！？])(?P<cjk>\s*)|\n|;(?!\\)"
    r"|[,\u2013\u2014]?\s+-{0,2}\s*(?=(?:would you|do you|want me|let me know|feel free|tell me)\b)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",\s+(?=(?:but(?=[^,]*\banswer)|so|therefore|thus|hence|then|which means)\b)", re.IGNORECASE)
_BLANKS = re.compile(r"\s{2,}|[^\S\n ]")
_PLAIN = str.maketrans({"\u2019": "'", "\uff0c": ",", "\uff1a": ":"})


class Reading(NamedTuple):
    """What a reply states: an answer, or None; and whether it takes earlier answers back."""

    answer: str | None
    withdraws: bool


def stated_answer(replies: Sequence[str]) -> str | None:
    """The answer that the replies surely state, by the rules above; None if there is none or it is not sure."""
    for reply in reversed(replies):
        text = _BLANKS.sub(_one_blank, reply.translate(_PLAIN)).strip()
        reading = _read(text)
        if reading.answer is not None or reading.withdraws or not _closes(text):
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
        else:
            for clause in _CLAUSE.split(sentence):
                if len(clause) > 4 * LONGEST:  # patterns backtrack over it
                    unsure = True
                elif not re.search(r"\w", clause) or _CLOSES.match(clause) or _offers(clause, marked or concluded):
                    continue
                elif (hedged := _HEDGED.match(clause)) is None and (statement := _ANSWER.match(clause)):
                    marked = _marked(statement)
                    unsure = not marked
                else:
                    repeats = _repeats(clause, marked or concluded or "")
                    unsure = unsure if marked is None else not repeats
                    concluded = (None if hedged else _conclusion(clause)) or (concluded if repeats else None)
    return Reading(None if unsure else marked or concluded, withdraws)


def _closes(reply: str) -> bool:
    """Whether a reply only closes the talk: it has a closing, and all else offers or is polite."""
    sentences = [sentence for sentence in _sentences(reply) if re.search(r"\w", sentence)]
    offers = [sentence for sentence in sentences if not _CLOSES.match(sentence)]
    return len(offers) < len(sentences) and all(map(_offers, offers)) and not _NUMBER.search(reply)


def _offers(clause: str, answer: str | None = None) -> bool:
    """Whether a clause is an offer without a result and without other numbers than the answer's, or polite."""
    if not (_OFFERS.match(clause) or _POLITE.match(clause)) or _RESULT.search(clause):
        return False
    numbers = {_plain(number) for number in _NUMBER.finditer(_COUNTED.sub("", clause))}
    return numbers <= {_plain(number) for number in _NUMBER.finditer(answer or "")}


def _marked(statement: re.Match[str]) -> str | None:
    """What a sentence says of "the answer", unless the words before that say that it is not the task's."""
    if statement[1] and _OF_A_PART.search(statement[1]):
        return None
    answer = next(group for group in statement.groups()[1:] if group is not None).strip(" :")
    return None if _REMARK.search(answer) else answer


def _repeats(clause: str, answer: str) -> bool:
    """Whether a clause ends in all numbers of the answer, or all its words if it has none, behind a verb or "=".

    No other number may follow, and nothing may deny or change them.
    """
    token = _NUMBER if _NUMBER.search(answer) else _WORD
    value, side = (text.rpartition("=")[2] for text in (answer, clause))
    needed, present = ([*token.finditer(text)] for text in (value, side))
    last = present[len(present) - len(needed) :]
    if not needed or [_plain(a) for a in needed] != [_plain(b) for b in last]:
        return False
    behind_a_verb = _BEHIND_A_VERB.search(side[: last[0].start()])
    return behind_a_verb is not None and not _DENIES.search(clause) and not _CHANGES.search(side)


def _plain(token: re.Match[str]) -> str:
    return token[0].replace(",", "").lower()


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
    if not (inner or _LEADS_TO_BOX.search(before) or _labels(before)):
        return None
    return rf"{content} \text{{{unit[1]}}}" if unit else content


def _labels(before: str) -> bool:
    """Whether the text before a box is a label that names what is asked for, as "Total cost:"."""
    return bool(_LABEL.match(before)) and not (_NO_LABEL.search(before) or _OF_A_PART.search(before))


def _sentences(reply: str) -> Iterator[str]:
    """The sentences of a reply, without list and emphasis markup; a label and the line after it are one sentence."""
    text = _UNBROKEN.sub(lambda formula: " ".join(formula[0].split()), reply)
    text = _STRUCK.sub("", text)
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
