"""Personal data with a form or an introduction that Presidio's recognizers do not cover, in plain text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator

from megatron_collab.user_logs.plain import UNSPACED

SECRET = "SECRET"  # passwords, which are hidden and not numbered
_IBAN_LENGTHS = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29
    ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20
    LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29
    PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20
    YE30
"""
_CARD = re.compile(r"4\d{12}(?:\d{3}){0,2}|(?:5[1-5]|2[2-7]|6\d|35)\d{14}|3[47]\d{13}|3[0689]\d{12}")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_RIPPLE = "rpshnaf39wBUDNEGHJKLM4PQRST7VWXYZ2bcdeCg65jkm8oFqi1tuvAxyz"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_NEW = r"(?<![a-zа-яё])"  # of a word, or behind a script without spaces
_BEGIN, _END = r"(?<![^\W_])", r"(?![^\W_])"  # of a word

_IS = (
    r"(?:\s*(?:\b(?:is|was|ist|war|lautet|est|es)\b|это|是|为|は|[=:-])"
    r"(?:\s+(?:now|still|currently|jetzt)\b)?){1,2}\s*"
)
_NUMBER = r"(?:\s*(?:numbers?|no\.?|nr\.?|#|id|nummer|num[eé]ro|número|номер|号码?|编号|番号))"
_ACCOUNT = (
    r"(?:account|acct\.?|a/c|customer|client|member|konto|kunden|compte|cuenta|cliente|сч[её]т[ау]?|клиента"
    r"|账号|账户|帐号|客户|会员|口座|会員)"
)
_SSN = r"(?:ssn|social security|социального страхования|社会保障|社会安全)"
_WALLET = (
    r"(?:wallet|bitcoin|btc|ethereum|solana|monero|usdt|кошел[её]к\w*|钱包|ウォレット)"
    r"(?:\s*(?:address|адрес|地址|アドレス))?"
)
_PASSWORD = (
    r"(?:pass ?words?|passphrase|passcode|pwd|pin(?: ?code)?|passwort|kennwort|mot de passe|contraseña|senha"
    r"|пароль|пин-код|密码|口令|パスワード|暗証番号)"
)
_SIGN = rf"[^\s{UNSPACED}\u3001\u3002]"  # of a password
_POSSESSIVE = r"(?:my|our|mein|unser|mon|mi|мой|наш|我的|我们的|私の)(?: new| old| neues)?\s*"
_STATES = (  # how a password is, rather than what it is
    r"(?:an?|also|always|blank|blocked|case|changed|correct|empty|encrypted|expired|forgotten|gone|hidden|in"
    r"|incorrect|invalid|known|leaked|locked|lost|missing|never|not?|ok|old|on|out|refused|rejected|required|reset"
    r"|right|safe|saved|secure|still|stolen|stored|strong|that|the|this|too|unknown|valid|weak|what|wrong|falsch"
    r"|abgelaufen|неверный|забыт)\b"
)
_STOP = rf"(?=[.,;!?]?(?:\s*\Z|\s*\n|[.,;!?]\s|\s+(?:and|but|und|и|а)\b|\s*[{UNSPACED}\u3001\u3002]))"
_HOST = r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}"
_FILE = r"(?!(?:js|ts|py|md|txt|json|ya?ml|toml|html?|css|cpp|rs|go|sh|java|rb|php|csv)\b)"
_COMMON = r"(?<!asp\.)(?:com|org|net|edu|gov|eu|uk|de|fr|nl|ch|cz|ru|ua|cn|jp|kr|br|рф|укр|中国|日本)"
_URL_END = r"[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"


def _is_card(text: str) -> bool:
    """Whether digits are those of a card's issuer, with the checksum of Luhn."""
    digits = re.sub(r"\D", "", text)
    doubled = (int(digit) * (1 + at % 2) for at, digit in enumerate(reversed(digits)))
    return (
        _CARD.fullmatch(digits) is not None and sum(map(sum, (map(int, str(number)) for number in doubled))) % 10 == 0
    )


def _is_base58(text: str) -> bool:
    """Whether an address has the checksum of Base58Check, in Bitcoin's alphabet or in Ripple's."""
    for alphabet in (_BASE58, _RIPPLE):
        number = 0
        for letter in text:
            number = number * 58 + alphabet.index(letter)
        payload = number.to_bytes(40, "big")[-25:]
        if hashlib.sha256(hashlib.sha256(payload[:-4]).digest()).digest()[:4] == payload[-4:]:
            return True
    return False


def _is_bech32(text: str) -> bool:
    """Whether an address has the checksum of Bech32 (BIP 173) or Bech32m (BIP 350)."""
    prefix, _, data = text.lower().rpartition("1")
    values = [ord(letter) >> 5 for letter in prefix] + [0] + [ord(letter) & 31 for letter in prefix]
    checksum = 1
    for value in values + [_BECH32.index(letter) for letter in data]:
        top, checksum = checksum >> 25, (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
            checksum ^= generator * (top >> bit & 1)
    return checksum in (1, 0x2BC830A3)


def _any(text: str) -> bool:
    return True


# Kind, pattern, whose group `value` is the data, else all of it, and a check of the data.
_FORMS: list[tuple[str, re.Pattern[str], Callable[[str], bool]]] = [
    (kind, re.compile(pattern, re.IGNORECASE), check)
    for kind, pattern, check in (
        (
            "EMAIL",
            r"\b[\w.+-]{1,64}\s?[\[({]\s?(?:at|собака)\s?[\])}]\s?[\w-]+"
            r"(?:\s?(?:\.|[\[({]\s?(?:dot|точка)\s?[\])}])\s?[\w-]+)+",
            _any,
        ),
        ("URL", rf"(?:\b[a-z][a-z0-9+.-]{{1,20}}://|\bwww\.){_URL_END}", _any),
        ("URL", rf"(?<![\w.@/-]){_HOST}{_FILE}[^\W\d_]{{2,24}}(?::\d{{1,5}})?[/?]{_URL_END}", _any),
        ("URL", rf"(?<![\w.@/-]){_HOST}{_COMMON}(?!\.?[\w(@-])", _any),
        ("CARD", rf"{_BEGIN}(?<!\d[.,])\d{{13,19}}{_END}", _is_card),
        ("CARD", rf"{_BEGIN}\d{{4}}(?:[ .-]\d{{4}}){{2}}[ .-](?:\d{{4}}[ .-]\d{{3}}|\d{{1,4}}){_END}", _is_card),
        ("CARD", rf"{_BEGIN}\d{{4}}[ .-]\d{{6}}[ .-]\d{{4,5}}{_END}", _is_card),
        (
            "ACCOUNT",
            rf"{_NEW}{_ACCOUNT}(?:{_NUMBER}(?:{_IS})?|{_IS}|\s*)\s*"
            rf"(?P<value>[a-z]{{0,4}}[ -]?\d(?:[ ./-]?[a-z]?\d){{4,}}){_END}",
            _any,
        ),
        ("SSN", rf"{_NEW}{_SSN}{_NUMBER}?(?:{_IS})?\s*(?P<value>\d{{3}}[ .-]?\d{{2}}[ .-]?\d{{4}}){_END}", _any),
        ("MAC", rf"\bmac(?:[ -]address)?(?:{_IS})?\s*(?P<value>[0-9a-f]{{12}}){_END}", _any),
        ("WALLET", rf"{_BEGIN}0x[0-9a-f]{{40}}{_END}", _any),
        ("WALLET", rf"{_BEGIN}(?-i:[{_BASE58}]{{25,36}}){_END}", _is_base58),
        ("WALLET", rf"{_BEGIN}[a-z]{{2,15}}1[{_BECH32}]{{38,110}}{_END}", _is_bech32),
        ("WALLET", rf"{_NEW}{_WALLET}(?:{_IS})?\s*(?P<value>[a-z0-9]{{26,106}}){_END}", _any),
        (SECRET, rf"{_NEW}{_PASSWORD}{_NUMBER}?{_IS}(?P<value>\"[^\"\n]+\"|'[^'\n]+'|`[^`\n]+`)", _any),
        (  # with a digit or another sign that words have not
            SECRET,
            rf"{_NEW}{_PASSWORD}{_NUMBER}?{_IS}(?={_SIGN}{{0,200}}[\d!#$%&*+/@^~\\])"
            rf"(?P<value>(?![*<]){_SIGN}{{3,200}}(?<![.,;:!?)\]}}\"']))",
            _any,
        ),
        (  # a word, if a clause ends after it
            SECRET,
            rf"{_NEW}(?:{_POSSESSIVE}{_PASSWORD}{_NUMBER}?{_IS}|{_PASSWORD}\s*[=:]\s*)(?!{_STATES})"
            rf"(?P<value>(?![*<]){_SIGN}{{3,64}}?){_STOP}",
            _any,
        ),
    )
]
_IBAN = re.compile(rf"{_BEGIN}(?=([a-z]{{2}}\d{{2}}(?:[ .-]?[a-z0-9]){{11,30}}))", re.IGNORECASE | re.ASCII)


def spans(text: str) -> Iterator[tuple[int, int, str]]:
    """Begin, end and kind of personal data in a plain text; they may overlap."""
    for kind, pattern, check in _FORMS:
        for match in pattern.finditer(text):
            group = "value" if "value" in pattern.groupindex else 0
            if check(match[group]):
                yield *match.span(group), kind
    lengths = {entry[:2]: int(entry[2:]) for entry in _IBAN_LENGTHS.split()}
    for match in _IBAN.finditer(text):
        ends = [at for at in range(*match.span(1)) if text[at].isalnum()]
        length = lengths.get(match[1][:2].upper(), len(ends) + 1)
        if length <= len(ends) and not text[ends[length - 1] + 1 :][:1].isalnum():
            end = ends[length - 1] + 1
            number = re.sub(r"[ .-]", "", text[match.start() : end])
            if int("".join(str(int(digit, 36)) for digit in number[4:] + number[:4])) % 97 == 1:
                yield match.start(), end, "IBAN"
