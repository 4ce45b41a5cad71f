"""Personal data in a conversation is detected and replaced, by the same placeholder in all texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_collab.settings import ConfigError
from megatron_collab.user_logs.personal import PersonalData, Placeholders
from megatron_collab.user_logs.plain import PlainText
from tests.user_logs.forms import FORMS, KINDS, WRITINGS, is_left, written


@pytest.fixture(scope="module")
def data() -> PersonalData:
    return PersonalData()


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("write to ann.meyer@corp.internal or b@example.org", "write to <EMAIL_1> or <EMAIL_2>"),
        ("ANN@example.org, i.e. ann@example.org", "<EMAIL_1>, i.e. <EMAIL_1>"),
        ("call +49 30 901820 or (212) 555-0187, not 12345678", "call <PHONE_1> or <PHONE_2>, not 12345678"),
        ("card 4111 1111 1111 1111 = 4111-1111-1111-1111", "card <CARD_1> = <CARD_1>"),
        ("4111 1111 1111 1112 has a wrong digit", "4111 1111 1111 1112 has a wrong digit"),
        ("DE89 3704 0044 0532 0130 00 is DE89370400440532013000", "<IBAN_1> is <IBAN_1>"),
        (
            "from 192.168.0.12 and fe80::1ff:fe23:4567:890a, mac 00:1B:44:11:3A:B7",
            "from <IP_1> and <IP_2>, mac <MAC_1>",
        ),
        ("ssn 219-09-9999; see https://example.org/u/ann?token=3", "ssn <SSN_1>; see <URL_1>"),
        (
            "http://wiki:8080/ann, (https://app.internal/reset/x1?t=2), http://10.0.0.1/ann or db://ann:pw7@corp.org/x.",
            "<URL_1>, (<URL_2>), <URL_3> or <URL_4>.",
        ),
        ("www.example.org/u/ann, shop.org/reset?u=ann and src/main.py", "<URL_1>, <URL_2> and src/main.py"),
        ("mail ann+news@example.org, key sk-abcdEFGH0123456789", "mail <EMAIL_1>, key ***"),
        (
            "std::min(a::b) in main.py, v1.2.3, on 2026-11-24 at 19:30",
            "std::min(a::b) in main.py, v1.2.3, on 2026-11-24 at 19:30",
        ),
        ("Mr. Klee, my name is Ann van Meyer", "Mr. <PERSON_1>, my name is <PERSON_2>"),
        (
            "Hi, my name's Ann. ann, Ann's and ANN, not Anna",
            "Hi, my name's <PERSON_1>. <PERSON_1>, <PERSON_1>'s and <PERSON_1>, not Anna",
        ),
        (
            "It is late.\nKind regards,\nBob Klee\nSent by Bob",
            "It is late.\nKind regards,\n<PERSON_1>\nSent by <PERSON_1>",
        ),
        ("ZOE_2.zip of zoe: my name is zoe quist.", "<PERSON_1>_2.zip of <PERSON_1>: my name is <PERSON_1>."),
        ("my name is ann and I am not anna", "my name is <PERSON_1> and I am not anna"),
        ("my name is on the list, no regards, and I am Sorry", "my name is on the list, no regards, and I am Sorry"),
        ("my name is not found.", "my name is not found."),
    ],
)
def test_what_has_a_form_or_is_introduced(data: PersonalData, text: str, replaced: str) -> None:
    places = Placeholders(data)
    places.read(text)
    assert places.replaced(text) == replaced
    assert places.replaced(replaced) == replaced


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_all_promised_forms_of_a_kind_are_replaced(data: PersonalData, kind: str) -> None:
    forms = [form for form in FORMS if form.kind == kind]
    assert len(forms) >= 40
    remaining, changed = [], []
    for form in forms:
        for way, text, value in written(form):
            places = Placeholders(data)
            places.read(text)
            clean = places.replaced(text)
            remaining += [(way, text, clean)] if is_left(value, clean) else []
            if way == "composed":
                mark = "***" if kind in ("KEY", "PASSWORD") else f"<{kind}_1>"
                changed += [(text, clean)] if clean != text.replace(value, mark) else []
    assert (remaining, changed) == ([], [])


@pytest.mark.parametrize("write", WRITINGS.values(), ids=WRITINGS)
def test_only_what_is_replaced_changes(data: PersonalData, write: Callable[[str], str]) -> None:
    before, after = write("\u00c7a \u2013 «½ kg» für 12 €: "), write(", 你好吗? \ufb01n \u2013 …")
    places = Placeholders(data)
    assert places.replaced(f"{before}ann@example.org{after}") == f"{before}<EMAIL_1>{after}"


@pytest.mark.parametrize(
    "original", ["a\u0301b", "\u1112\u1161\u11ab x", "我叫Ann½", "\u200ba\u00ad\u00a0b\u2013", "\ufb01n\r\n", ""]
)
def test_every_part_of_a_plain_text_has_its_place_in_the_original(original: str) -> None:
    view = PlainText(original)
    places = [view.place(at, at + 1) for at in range(len(view.text))]
    assert all(0 <= begin <= end <= len(original) for begin, end in places)
    assert places == sorted(places)
    assert {at for begin, end in places for at in range(begin, end)} >= {
        at for at, character in enumerate(original) if character.isalnum()
    }


@pytest.mark.parametrize(
    ("name", "text", "clean"),
    [
        ("王小明", "我是王小明的朋友。", "我是<PERSON_1>的朋友。"),
        ("田中太郎", "田中太郎さんへ", "<PERSON_1>さんへ"),
        ("สมชาย", "คุณสมชายโทรมา", "คุณ<PERSON_1>โทรมา"),
        ("Zoe\u0308", "ZO\u00cb and zo\u00eb", "<PERSON_1> and <PERSON_1>"),
        ("Jos\u00e9 Groß", "jose\u0301 GROSS", "<PERSON_1>"),
        ("Ann van der Berg", "Ann sat in the van. Berg left.", "<PERSON_1> sat in the van. <PERSON_1> left."),
        ("Prof. Eva Klee", "A prof. said: Klee", "A prof. said: <PERSON_1>"),
    ],
)
def test_a_name_that_is_known_is_replaced_in_every_spelling(
    data: PersonalData, name: str, text: str, clean: str
) -> None:
    places = Placeholders(data)
    places.add(name)
    assert places.replaced(text) == clean


def test_all_texts_of_a_conversation_share_placeholders(data: PersonalData) -> None:
    texts = ["I am b@x.org", "Is b@x.org right, or a@x.org?", "a@x.org. Regards, Ann Meyer"]
    places = Placeholders(data, ["u-77-blue"])
    for text in texts:
        places.read(text)
    clean = [places.replaced(text) for text in texts]
    assert clean == ["I am <EMAIL_1>", "Is <EMAIL_1> right, or <EMAIL_2>?", "<EMAIL_2>. Regards, <PERSON_1>"]
    assert places.counts == {"PERSON": 1, "EMAIL": 2}
    assert places.replaced("U-77-Blue") == "<PERSON_2>", "what the log calls the person"
    assert places.counts == {"PERSON": 2, "EMAIL": 2}


def test_added_texts_are_replaced_as_whole_words_and_placeholders_stay(data: PersonalData) -> None:
    places = Placeholders(data)
    for text, kind in (
        ("Eva  Lind", "PERSON"),
        ("12 Elm Street", "DETAIL"),
        ("x", "PERSON"),
        ("", "DETAIL"),
        ("EMAIL", "PERSON"),
    ):
        places.add(text, kind)
    sentence = "eva of 12 elm\nstreet, Lind, evangelic <EMAIL_1> x"
    assert places.replaced(sentence) == "<PERSON_1> of <DETAIL_1>, <PERSON_1>, evangelic <EMAIL_1> x"


@pytest.mark.seconds
def test_a_model_of_spacy_finds_names_that_nothing_introduces(tmp_path: Path) -> None:
    import spacy  # which takes seconds

    pipeline = spacy.blank("en")
    pipeline.add_pipe("entity_ruler").add_patterns(
        [{"label": "PERSON", "pattern": "Zoe"}, {"label": "GPE", "pattern": "Rome"}]
    )
    pipeline.to_disk(tmp_path / "names")
    places = Placeholders(PersonalData(str(tmp_path / "names")))
    places.read("Zoe flies to Rome")
    assert places.replaced("Zoe flies to Rome") == "<PERSON_1> flies to Rome"
    with pytest.raises(
        ConfigError, match=r"^--spacy=no_such_model: spaCy cannot load it .*; install it with python -m"
    ):
        PersonalData("no_such_model")
