"""Names that a text introduces: by a phrase such as "my name is", by a title, or after a greeting at its end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_collab.user_logs.plain import UNSPACED

_SHORT_TITLES = ("mr", "mrs", "dr", "prof", "mme", "г-н", "г-жа")  # no other words, so they count in small letters too
TITLES = (
    *(*_SHORT_TITLES, "ms", "miss", "mx", "professor", "sir", "herr", "frau", "mlle", "sr", "sra", "señor", "señora"),
    *("господин", "госпожа"),
)
PARTICLES = (
    *("van", "von", "de", "der", "den", "del", "della", "di", "da", "das", "do", "dos", "du", "la", "le", "el", "al"),
    *("bin", "ibn", "bint", "ten", "ter", "zu", "zum", "af", "av", "y", "san", "фон", "де"),
)
_STATED = (
    r"\b(?:(?:my|full|first|last) name(?: is|'s|:)|name:|i am called|this is(?= [^.!?\n]{2,40} (?:speaking|calling)\b)"
    r"|mein name ist|ich hei(?:ß|ss)e|je m'appelle|mon nom est|me llamo|mi nombre es|mi chiamo|меня зовут|мо[её] имя"
    r"|имя:)\s*"
)
_SIGNED = (
    r"\b(?:(?:regards|sincerely|cheers|yours|grü(?:ß|ss)en?|cordialement|saludos|atentamente|уважением),"
    r"|(?:best|thanks|thank you|danke|merci|gracias|спасибо)[,.!]?[ ]*\n)\s*"
)
_ANY_TITLE, _SHORT_TITLE = (rf"\b(?:{'|'.join(titles)})\b(?:\.\s*|\s+)" for titles in (TITLES, _SHORT_TITLES))
_PHRASES = re.compile(
    rf"(?:(?P<stated>{_STATED})|(?P<signed>{_SIGNED})|(?P<short>{_SHORT_TITLE})|{_ANY_TITLE})(?:{_ANY_TITLE})*",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"(?P<gap>[ ]*)(?:(?P<initial>[^\W\d_]\.)|(?P<word>[^\W\d_](?:[\w'-]*\w)?))")
# By the kind of phrase: what must follow a name in small letters, because many words follow such phrases.
_ENDS = {
    "stated": re.compile(
        r"\s*(?:[.,;:!?)\n-]|\Z|(?:and|but|from|speaking|calling|und|aber|et|y|и|а|но|из)\b)", re.IGNORECASE
    ),
    "signed": re.compile(r"[\s.!]*\Z"),
    "short": re.compile(""),
}
# Words that follow the phrases, and words that follow a name in a text that is all in capitals.
_NO_NAME = frozenset(
    re.findall(
        r"\S+",
        """
        a all already also an and as at but by calling can for from here i im in int is it list me misspelled missing
        my no none not null of on or please speaking still str string text thanks that the this to too was we what when
        with wrong you your und aber aus der die das ich ist nicht et mais je le la est y pero es и а но из я не мой
        """,
    )
)
_HAN, _KANA = r"\u4e00-\u9fff", r"\u3040-\u30ff\u3005\u30fb"
_SURNAMES = (
    "王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕苏卢蒋蔡"
    "贾丁魏薛叶阎余潘杜戴夏钟汪田任姜范方石姚谭廖邹熊金陆郝孔白崔康毛邱秦江史顾侯邵孟龙万段"
    "雷钱汤尹黎易常武乔贺赖龚文欧司諸張劉陳楊趙黃吳孫馬羅鄭謝韓馮"
)
_UNSPACED_PHRASES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?:我(?:的名字)?(?:叫做?|是叫)(?![不了他她你它人车外出])|我的名字是|(?:姓名|名字)(?:是|:)|本人)\s*"
        rf"([{_HAN}]+·[{_HAN}]+|[{_HAN}]{{2,4}}?(?![{_HAN}])"
        rf"|[{_HAN}]{{2,4}}?(?=我|想|要|来自|住在|今年|的|和)|[{_HAN}]{{3}})",
        rf"([{_SURNAMES}][{_HAN}]{{0,2}})(?=先生|女士|小姐|太太)",
        rf"名前(?:は|:)\s*([{_HAN}{_KANA}]{{2,9}}?)(?=です|と|だ|$|[^{_HAN}{_KANA}])",
        rf"(?:^|[、。!?\s]|私は)([{_HAN}\u30a0-\u30ff\u3005]{{2,9}})と(?:申し|言い|いい)ます",
        r"이름은\s*([가-힣]{2,4}?)(?=입니다|이에요|예요|이고|이야|$|[^가-힣])",
        r"(?:저는|나는)\s*([가-힣]{2,4}?)(?:이?라고)",
    )
)


def introduced(text: str) -> Iterator[str]:
    """The names that a plain text introduces."""
    for phrase in _PHRASES.finditer(text):
        ends = _ENDS.get(phrase.lastgroup or "")
        name = _in_capitals(text, phrase.end()) or (_in_small_letters(text, phrase.end(), ends) if ends else "")
        if len(name.strip(".")) > 1:
            yield name.removesuffix("'s")
    for pattern in _UNSPACED_PHRASES:
        yield from (match[1] for match in pattern.finditer(text))


def _tokens(text: str, begin: int) -> Iterator[tuple[str, int]]:
    """The words and initials that follow each other from there on, each with its end."""
    at = begin
    while (token := _TOKEN.match(text, at)) and (at == begin or token["gap"] or text[at - 1] == "."):
        at = token.end()
        yield token["initial"] or token["word"], at


def _in_capitals(text: str, begin: int) -> str:
    """The name that begins there: at most five words with a capital, and initials, with particles between them."""
    end, words = begin, 0
    for word, at in _tokens(text, begin):
        if word.casefold() in PARTICLES and (words or word[0].isupper()):
            continue  # it counts if a name follows
        if word.casefold() in _NO_NAME or len(word) < 2 or word[0].islower() or words == 5:
            break
        end, words = at, words + 1
    return text[begin:end].strip()


def _in_small_letters(text: str, begin: int, ends: re.Pattern[str]) -> str:
    """The name of one or two words that begins there, if it ends as it must."""
    words = 0
    for word, at in _tokens(text, begin):
        if word in PARTICLES:
            continue
        if word.casefold() in _NO_NAME or len(word) < 2 or words == 2:
            break
        words += not word.endswith(".")
        if words and ends.match(text, at):
            return text[begin:at].strip()
    return ""


def is_unspaced(text: str) -> bool:
    """Whether a text is of a script without spaces, whose words have no ends."""
    return re.fullmatch(rf"[{UNSPACED}·・\s]+", text) is not None
