"""What a simulation writes: JSON for programs, a page for people."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpu_align.simulate import Record, simulate, to_json
from gpu_align.tools import html
from gpu_align.tools.simulate.tokenizers import line_ending_ids, load_tokenizer, token_texts
from tests.gpu_align.test_simulate_replay import Oracle, Scripted


class Structure(HTMLParser):
    """Which elements a page has, and what text stands in its token blocks."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.blocks: list[str] = []
        self._in_block = False
        self._open: list[str] = []
        self.feed(document)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self._open.append(tag)
        if tag == "pre":
            self.blocks.append("")
            self._in_block = True

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._in_block = self._in_block and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_block:
            self.blocks[-1] += data


def test_json_schema() -> None:
    records = [Record("a", [], [1, 2, 3], [1, 2, 3]), Record("b", [], [4, 5], [4, 5])]
    results = simulate(records, [Oracle(), Scripted([[9], [9]])], 2)
    found = json.loads(json.dumps(to_json(results, 2, {"tokenizer": None}), allow_nan=False))
    assert list(found) == ["version", "tokenizer", "num_draft_tokens", "policies"]
    assert found["num_draft_tokens"] == 2
    oracle, scripted = found["policies"].values()
    assert oracle.pop("propose_us_median") > 0
    assert oracle == {
        "output_tokens": 5, "steps": 4, "accepted": 3, "rejected": 0, "tokens_per_step": 1.25,
        "rejected_per_accepted": 0.0,
        "pairs": [
            {"id": "a", "output_tokens": 3, "steps": 2, "accepted": 2, "rejected": 0},
            {"id": "b", "output_tokens": 2, "steps": 2, "accepted": 1, "rejected": 0},
        ],
    }  # fmt: skip
    assert (scripted["accepted"], scripted["rejected"], scripted["rejected_per_accepted"]) == (0, 3, None)


def test_hostile_token_text_stays_text() -> None:
    hostile = [
        "<script>alert(1)</script>", "</pre>", '" onmouseover="x', "&lt;", "\n", "\x00\x1b[2J\r\x7f", "\ud800",
    ]  # fmt: skip
    document = html.page(
        "</title><script>1</script>",
        [
            html.tokens(hostile, [1] * len(hostile), list(range(len(hostile)))),
            html.details("<script>2</script>", "<b>", html.note("<i>")),
            html.table(["<u>"], [["<script>3</script>"]]),
            html.heading("<script>4</script>"),
            html.legend([0, 1]),
        ],
    )
    document.encode("utf-8")
    page = Structure(document)
    assert not {"script", "b", "i", "u"} & set(page.elements)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.blocks == ['\n<script>alert(1)</script></pre>" onmouseover="x&lt;\n␀␛[2J␍␡?']
    assert "<script" not in document


def test_text_of_tokens_is_the_text() -> None:
    pytest.importorskip("mistral_common")
    tekken = load_tokenizer("tekken")
    text = "def f():\n    return 'é 🙂 \u0939\u093f' # <s>\r\n\n"
    ids = tekken.encode(text)
    assert "".join(token_texts(tekken, ids)) == text
    assert len(token_texts(tekken, ids)) == len(ids)
    # Cut inside the emoji's bytes: shown as unreadable, not dropped, and no error.
    emoji = tekken.encode("\U0001fae8")
    assert len(emoji) > 1
    assert "".join(token_texts(tekken, emoji[:-1])) == "\ufffd"
    assert token_texts(tekken, [2**31 - 1]) == ["\ufffd"]
    assert token_texts(tekken, []) == []
    ids = tekken.encode("def f(x):\n    return (x)\n\n\ny = 1\n")
    ends = line_ending_ids(tekken, ids)
    assert [("\n" in text) for text in token_texts(tekken, ids)] == [token in ends for token in ids]
    assert 0 < len(ends) < len(set(ids))


BYTE_LEVEL, SENTENCEPIECE = "byte-level", "sentencepiece"


@pytest.fixture(params=[BYTE_LEVEL, SENTENCEPIECE])
def tokenizer_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small tokenizer on disk of the two kinds that transformers knows."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    if request.param == BYTE_LEVEL:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    else:
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<unk>", *bytes_as_tokens])
    made.train_from_iterator(["def f(x): return x", "f(x) + f(y)"] * 5, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(tmp_path)
    return tmp_path


def test_transformers_tokenizers_from_a_folder(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    text = "def f(y): return é 🙂\nf(x)"
    ids = tokenizer.encode(text)
    assert "".join(token_texts(tokenizer, ids)) == text
    assert tokenizer.token_bytes(0) == b"<s>"
    newline = next(i for i in ids if b"\n" in tokenizer.token_bytes(i))
    assert line_ending_ids(tokenizer, ids) == {newline}
