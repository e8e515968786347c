"""`gpu_align.texts.views`: each view against its inverse, what is left alone, and what it costs."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_align.texts.views import MIN_LISTED, NAMES, in_forms, make, of_message, texts_in

LINES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=30), min_size=MIN_LISTED
)


def view(text, name):
    """One view; the text itself or "" where there is none."""
    return (make(text, [name]) or [""])[0]


def unquoted(text):
    return json.loads(f'"{text}"')


def without_first(text):
    return "".join(line[1:] for line in re.findall(r".*\n|.+", text))


#: View → its inverse.
INVERSES = {
    "json": unquoted,
    "json_ascii": unquoted,
    "json_slash": unquoted,
    "json_twice": lambda text: unquoted(unquoted(text)),
    "diff": without_first,
    "diff_minus": without_first,
}


@pytest.mark.parametrize("name", INVERSES)
@given(text=st.text())
def test_inverse_gives_the_text(name, text):
    found = make(text, [name])
    assert [INVERSES[name](each) for each in found] == ([text] if found else [])
    if not found:
        assert text == "" or text == json.dumps(text, ensure_ascii=name == "json_ascii")[1:-1]
        assert name != "json_slash" or "/" not in text
    if name == "json_ascii":
        assert all(each.isascii() for each in found)
    if name == "json_slash":
        assert not any(re.search(r"(?<!\\)/", each) for each in found)


#: How a tool numbers a line.
NUMBERED = {
    "cat -n": "{n:6}\t{line}",
    "short tab": "{n}\t{line}",
    "colon": "{n}:{line}",
    "colon, blank": "{n}: {line}",
    "arrow": "{n:5}→{line}",
    "bar": "{n}|{line}",
    "bar, blanks": "{n:<4} | {line}",
    "zeros": "{n:05}| {line}",
}


@pytest.mark.parametrize("style", NUMBERED)
@given(lines=LINES, first=st.integers(0, 2000), ended=st.booleans())
def test_numbers_go(style, lines, first, ended):
    # An indent is even somewhere, else a blank is taken for the number's. The text around it is no listing.
    lines = [*lines, "end"]
    listing = "\n".join(NUMBERED[style].format(n=first + i, line=line) for i, line in enumerate(lines))
    text = "\n".join(lines) + "\n"
    assert view(f"The file:\n{listing}\n(12 more lines)\n", "unnumbered") == text
    assert view(listing + "\n" * ended, "unnumbered") == text


@given(lines=LINES)
def test_fences_go(lines):
    body = "".join(f"{line}\n" for line in lines)
    text = f"Look:\n`````python\n{body}`````\nand\n~~~~~~\n{body}~~~~~~\nopen:\n`````\n{body}"
    if not any(line.strip().startswith(("`````", "~~~~~~")) or "\r" in line for line in lines):
        assert view(text, "unfenced") == body * 3


@given(text=st.text(), other=st.text(), ascii_only=st.booleans())
def test_strings_of_json_come_out(text, other, ascii_only):
    arguments = json.dumps({"path": "a.py", "content": text, other: 1.5}, ensure_ascii=ascii_only)
    found = view(f"a call: {arguments}", "unescaped")
    assert found == "".join(each for each in (text, other) if "\n" in each)


#: Text, name of a view, what it is; () where there is none.
GIVEN = {
    "the first example": ('a = "b"\n', "json", ('a = \\"b\\"\\n',)),
    "two listings": ("1:a\n2:b\n3:c\n\n7:d\n8:e\n9:f", "unnumbered", ("a\nb\nc\nd\ne\nf\n",)),
    "two lines": ("1:a\n2:b\n", "unnumbered", ()),
    "a CSV": ("1,a,2\n2,b,3\n3,c,4\n4,d,5\n", "unnumbered", ()),
    "slashes": ('"a\\/b"\n', "json_slash", (r"\"a\\\/b\"\n",)),
    "nothing": ("", "diff", ()),
    "tags of a file": ('<file path="a">\na\nb</file> <code>c\n</code>', "untagged", ("a\nbc\n",)),
    "the innermost tag": (
        "<document><source>a</source><contents>a\nb\n</contents></document>",
        "untagged",
        ("a\nb\n",),
    ),
    "no tags of a file": ("<div>\na\n</div><code>a</code><code>\nb\n</file>c\n</code>", "untagged", ()),
    "broken JSON": ('{"content": "a\\nb\\q", "more": "a\\n', "unescaped", ()),
    "an open quote in the line before": ('it is 5" long\n{"x": "a\\nb"}', "unescaped", ("a\nb",)),
    "no line end": (r'{"a": "C:\\new"}', "unescaped", ()),
    "a lone surrogate": ("\ud800\n", "json", ("\ud800\\n",)),
}


@pytest.mark.parametrize("case", GIVEN)
def test_what_a_view_is(case):
    text, name, views = GIVEN[case]
    assert make(text, [name]) == list(views)


def test_forms_of_texts():
    found = in_forms(["a\nb\n", "c", "", "a\nb\n"])
    patch = [" a\\n b\\n", "-a\\n-b\\n"]  # in a string
    assert found == ["a\nb\n", "a\\nb\\n", "c", *patch, " a\n b\n", "-a\n-b\n", " c", "-c"]
    assert in_forms(["a\n"], ["diff"]) == ["a\n", " a\n"]
    assert in_forms(["a\n"], []) == ["a\n"]
    assert in_forms([]) == []


#: A message, and the texts in it.
MESSAGES = {
    "prose": ("Please change it.", []),
    "a listing": ("The file:\n1:a\n2: b\n3:c\n(end)", ["a\n b\nc\n"]),
    "a fence": ("Change\n```py\nx = 1\n```\nplease", ["x = 1\n"]),
    "a tool's arguments": ('{"path": "a", "text": "x\\n\\"y\\"\\n"}', ['x\n"y"\n']),
    "a listing in JSON": ('{"text": "1\\ta\\n2\\tb\\n3\\tc\\n"}', ["a\nb\nc\n"]),
    "tags": ("<code>f()\n</code>\n<file_contents>\n1:a\n2:b\n3:c\n</file_contents>", ["a\nb\nc\n"]),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_texts_of_a_message(case):
    message, texts = MESSAGES[case]
    assert texts_in(message) == texts


def test_a_message_that_is_a_text():
    """Less than half of it stands in fences."""
    file = 'def f():\n    """Add.\n\n```\nf()\n```\n"""\n    return 1\n'
    assert texts_in(file, whole=True) == [file, "f()\n"]
    assert texts_in("", whole=True) == []


@pytest.mark.parametrize(
    ("message", "is_result", "of_json", "of_text"),
    [
        ("a\nb", False, [], []),
        ("a\nb", True, ["a\\nb", " a\\n b", "-a\\n-b", "a\nb"], []),
        ("```\na\n```", False, ["a\\n", " a\\n", "-a\\n", "a\n"], ["a\n", " a\n", "-a\n"]),
        ("1:a\n2:b\n3:c\n", True, ["a\\nb\\nc\\n", " a\\n b\\n c\\n", "-a\\n-b\\n-c\\n", "a\nb\nc\n"],
         ["a\nb\nc\n", " a\n b\n c\n", "-a\n-b\n-c\n"]),
        ("one line", True, [], []),
    ],
)  # fmt: skip
def test_what_a_message_is_drafted_in(message, is_result, of_json, of_text):
    assert of_message(message, True, is_result) == of_json
    assert of_message(message, False, is_result) == of_text


@pytest.mark.parametrize("name", ["upper", "", "json+", "json+json+json", "JSON", None, ["json"]])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"views\[1\]: expected one of json, json_ascii, .*unescaped, found"):
        make("a", ["json", name])


#: What is hard about a text, in so many characters.
HARD = {
    "backslashes": lambda size: "\\" * size,
    "open strings": lambda size: '"\\n' * (size // 3),
    "backticks": lambda size: "`" * size,
    "open tags": lambda size: "<code \n<code>" * (size // 13),
    "fences": lambda size: "```\n````\n" * (size // 9),
    "numbers": lambda size: "".join(f"{n}:\n" for n in range(size // 8)),
}


@pytest.mark.parametrize("kind", HARD)
def test_time_is_linear(kind):
    text = HARD[kind](1_000_000)
    for name in NAMES:
        start = time.process_time()
        make(text, [name])
        assert time.process_time() - start < 2, name
