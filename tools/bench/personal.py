"""Does personal data in the promised forms leave a text, and does other text stay as it is?

`python tools/bench/personal.py` replaces personal data, as `megatron-collab users-from-logs` does without a model, in:

- forms: texts with data in the forms of tests/user_logs/forms.py, written in several ways; left: how many still hold a
  part of it, which must be none.
- over_scrubbed: share of 2,000 sentences without personal data that are changed, at most 0.02. A grammar makes them, of
  numbers, dates, prices, code and names of products.

--smoke: every twentieth of each.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_collab.user_logs.personal import PersonalData, Placeholders

SENTENCES = 2000

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.user_logs.forms import FORMS, is_left, written  # noqa: E402

# A line is a production of the name before the colon. A name in braces is replaced by one of its productions, # by a
# digit; | separates productions.
GRAMMAR = r"""
sentence: The {product} costs {price} since {date}.
sentence: I ordered {count} of the {product} on {date}, order {order}.
sentence: {code}
sentence: In {code} the result is {number}, not {number}.
sentence: My password is {state}.
sentence: My name is {misprint}.
sentence: Version {version} of {product} crashes at {time}.
sentence: Chapter {count}, pages ##-##, and table #.#.
sentence: Dear {role}, hi.
sentence: The meeting on {date} at {time} took ## minutes.
sentence: It weighs #.## kg and is ##x##x## cm.
sentence: {count} {unit} for {price}?
sentence: Why does `{code}` print {number}?
sentence: I miss the {product}; thanks, it was {number} % cheaper.
sentence: The account is {state}.
sentence: Заказ {order} от {date} стоил {price}.
sentence: Версия {version} не работает с {date}.
sentence: Пароль {state_ru}, что делать?
sentence: 订单{order}在2026年##月##日花了####元。
sentence: 第#章有##页,版本{version}。
sentence: 我的密码错了,怎么办?
sentence: 我叫不出名字。
sentence: We need ### {unit} by {date}: {number} and {number}.
sentence: See section #.#.# of {file}.
sentence: Our customers like {product}.
sentence: The pin is bent, and the wallet is lost.
sentence: Call me at {time}, or on {date}.
sentence: Is {number} a prime, or {number}?
sentence: Thanks, but it does not work.
sentence: The ratio was #:#, the score ###-###.
sentence: He scored ## of ### points in {year}.
sentence: Is this the right name for {file}? Regards, and thanks.
sentence: Die Frau hat {count} {unit} bestellt, am {date}.
sentence: She is a member since {year}, a customer for ## years.
product: Node.js | ASP.NET | iPhone ## | Galaxy S## | Vue.js | Windows 1# | RTX 40#0 | Office 365 | Boeing 7#7 | WD-40
product: Python 3.## | Model Y | Airbus A3## | PlayStation # | Core i#-#####K | LG-##UK### | Rust | Photoshop CS#
price: $#.## | $#,###.## | ## EUR | €##,## | #,###,### USD | #.### € | £##.##
date: 202#-0#-1# | 1#/0#/202# | #.1#.202# | March #th | 0#.0#.202# | 202#/1#/0# | 1# May 19##
time: 1#:## | #pm | 0#:##:## | #.30
count: # | ## | ### | a dozen
order: ####### | A-####-## | no. ###### | ####-#### | PO########## | #####-##
number: #.##### | ## | #,### | -#.##e-# | 1:# | ######## | 0x#f#a | 1e## | 3.14159265 | ###.### | 10^#
version: #.#.# | v#.##.# | #.#-rc# | 20##.# | #.##.###
unit: litres | boxes | people | GB | km
state: wrong | not working | required | too short. | invalid | case-sensitive | still the same | blocked
state_ru: неверный | забыт | не подходит
misprint: not shown | wrong on the invoice | too long for the form | on the list | the same as before | missing
role: Sir or Madam | all | support team | customer service
year: 19## | 20##
file: main.py | README.md | src/data/rows.py | ./docs/howto/user.md | C:\temp\log.txt | index.html
code: x = np.zeros((##, ##)) | for i in range(###): | std::min(a::b) | user.name.lower() | if a[#:#] == b[#]:
code: import os.path as p | def f(name: str, n: int) -> None: | SELECT * FROM t WHERE id = ####
code: pip install torch==#.#.#
code: self.info.id += # | git checkout a1b#c#d | #include <vector> | ["id", ####, #.##] | <div class="x-##">
code: logging.info('%d', ##) | x@y == z.T @ w | arr[::#] | foo::bar<int>() | docker run -p ##:## app
"""


def innocent(count: int) -> Iterator[str]:
    """Sentences of the grammar; the same ones every time."""
    draw, productions = random.Random(0), dict[str, list[str]]()
    for line in GRAMMAR.strip().splitlines():
        name, _, texts = line.partition(": ")
        productions.setdefault(name, []).extend([texts] if name == "sentence" else texts.split(" | "))

    def expand(name: str) -> str:
        text = re.sub(r"\{([a-z_]+)\}", lambda match: expand(match[1]), draw.choice(productions[name]))
        return re.sub("#", lambda _: str(draw.randint(1, 9)), text)

    return (expand("sentence") for _ in range(count))


def replaced(data: PersonalData, text: str) -> str:
    places = Placeholders(data)
    places.read(text)
    return places.replaced(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few of each: shows that it runs, no figures")
    every = 20 if parser.parse_args().smoke else 1
    data, remaining, changed = PersonalData(), 0, 0
    texts = [(form.kind, *way) for form in FORMS for way in written(form)][::every]
    for kind, way, text, value in texts:
        clean = replaced(data, text)
        if is_left(value, clean):
            remaining += 1
            print(f"left, {kind}, {way}: {text!r} is {clean!r}")
    sentences = list(innocent(SENTENCES))[::every]
    for text in sentences:
        clean = replaced(data, text)
        if clean != text:
            changed += 1
            print(f"changed: {text!r} is {clean!r}")
    values = {"forms": len(texts), "left": remaining, "over_scrubbed": round(changed / len(sentences), 4)}
    print(json.dumps({"name": "personal", "values": values}))


if __name__ == "__main__":
    main()
