"""60 texts that are easy to get wrong: ends of lines, marks, joiners, directions, tabs, normal forms."""

from __future__ import annotations

import unicodedata

_BASE = (
    "",
    "plain\n",
    "naïve café, Ångström, Straße\n",
    "日本語のテキスト\n中文文本\n한국어\n",
    "שלום עולם\nمرحبا بالعالم\n",
    "नमस्ते दुनिया\nสวัสดี\n",
    "Привет, мир\nΚαλημέρα κόσμε\n",
)

TEXTS: tuple[str, ...] = (
    # ends of lines
    "a\r\nb\r\nc\r\n",
    "a\rb\rc\r",
    "a\nb\r\nc\rd\n\r\n\r",
    "\r\n\r\n\r\n",
    "no end",
    "a\n\n\n\nb\n",
    "\n",
    "a\u2028b\u2029c\u0085d\x0be\x0cf\n",
    # byte order marks and zero width
    "\ufeffint main() {}\n",
    "a\ufeffb\ufeff\n",
    "zero\u200bwidth\u200cnon\u200djoiner\u2060word\n",
    "soft\u00adhyphen, no\u00a0break, thin\u2009space\n",
    "\u200b\u200b\u200b",
    # emoji
    "🙂🙃😉\n",
    "👩‍👩‍👧‍👦 👨🏽‍💻 🏳️‍🌈\n",
    "👍🏻👍🏼👍🏽👍🏾👍🏿\n",
    "🇩🇪🇫🇷🇯🇵\n",
    "1️⃣2️⃣#️⃣ ❤️ ❤\n",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿\n",
    "def 🙂(x): return '🙂' * x\n",
    # combining marks
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323\n",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!\n",
    "\u0301 begins with a mark\n",
    "각 각\n",
    # tabs and spaces
    "\tif x:\n\t\treturn\t1\n",
    "    four\n  two\n \t mixed \t\n",
    "trailing   \nspaces\t\t\n",
    " " * 80 + "x\n",
    "\t" * 40 + "x\n",
    "a  b   c    d     e\n",
    "\u3000full\u3000width\u3000spaces\u3000\n",
    # normal forms
    *(unicodedata.normalize(form, "Åﬁ½①ｶﾞ각é\n") for form in ("NFC", "NFD", "NFKC", "NFKD")),
    "ﬁ ﬂ ﬀ ＡＢＣ １２３ ㎏\n",
    "\u212b \u00c5 A\u030a\n",
    # directions
    "abc \u202eסדר הפוך\u202c def\n",
    "if (x) { \u2066// admin\u2069 }\n",
    "א1ב2ג3 (ד) [ה] {ו}\n",
    # beyond the first plane, controls, the unassigned
    "𝒳𝔄𝕊 𐍈 𠮷 𝟘𝟙\n",
    "\U0010ffff\U000e0001\uffff\ufffe\n",
    "\0nul\0\n",
    "\x01\x02\x1b[31mred\x1b[0m\x7f\n",
    "\ufffd replacement \ufffd\n",
    # what tokenizers treat in their own way
    "</s><s>[INST]<|endoftext|><unk><pad>\n",
    "▁sentencepiece▁ Ġbyte Ċlevel\n",
    "1234567890 3.14159 1e-9 0xDEADBEEF 1_000_000\n",
    "don't we'll I'm they've\n",
    "https://example.org/a?b=c&d=%20#e\n",
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9\\n"}\n',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",
    "CamelCaseIdentifier snake_case_name SCREAMING_CASE kebab-case\n",
    *_BASE[1:],
    "  leading and trailing  ",
)
