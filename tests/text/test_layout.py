from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from st_reba.text.layout import Layout, repeated_chunks
from st_reba.text.layouts import frames, room
from st_reba.text.templates import MAX_TEMPLATE_LENGTH, TEMPLATES, Template, normalized
from st_reba.text.tokens import special_tokens

from ..backbones import tokenizer
from . import laid_out

TOKENIZERS = {kind: tokenizer(kind) for kind in ("bytes", "bert", "sentencepiece")}
each_kind = pytest.mark.parametrize("kind", TOKENIZERS)

#: Also with braces.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.just("{text} {0} {text.__class__}")
literals = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}"), max_size=12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""), ("\n\t", "\n\t"), ("A cat sat", "A cat sat."), ("A cat sat.", "A cat sat."),
        ("A cat sat!", "A cat sat!."), ("Did it sit?", "Did it sit."), ("Did it? Yes", "Did it? Yes."),
        ('He said "sit"', "He said 'sit'"), ('"Sit?" he said', "'Sit?' he said."), ("A cat 🥊", "A cat 🥊."),
        ("我爱猫", "我爱猫。"), ("我爱猫！", "我爱猫！。"), ("你爱猫吗？", "你爱猫吗。"),
        ("他说：“你好”", "他说：‘你好’"), ("我爱 cats", "我爱 cats."),
    ],
)  # fmt: skip
def test_texts_are_normalised_as_released(text, expected):
    """At most one character more, and each other in its place."""
    assert normalized(text) == expected
    assert len(expected) - len(text) in (0, 1)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if f"{name}-zh" in TEMPLATES])
def test_prompts_have_chinese_counterparts(name):
    for preset in (name, f"{name}-zh"):
        assert str(Template.parse(preset)) == TEMPLATES[preset]
    assert Template.parse(name).copies == Template.parse(f"{name}-zh").copies
    # The English ones stand in quotation marks that normalisation keeps out of the text, and so do the Chinese ones.
    assert ('"{text}"' in TEMPLATES[name]) == ("“{text}”" in TEMPLATES[f"{name}-zh"])


def test_a_template_has_slots_and_literals():
    template = Template.parse("Rewrite: {text}, rewritten: {text}!")
    assert template.literals == ("Rewrite: ", ", rewritten: ", "!")
    assert template.copies == 2
    assert Template.repeat(3) == Template.parse("{text}{text}{text}")
    assert Template.parse("Of {prepend} {text}").literals == ("Of {prepend} ", "")
    assert Template.parse("x" * (MAX_TEMPLATE_LENGTH - 6) + "{text}").copies == 1


@given(st.lists(literals, min_size=2, max_size=5))
def test_a_template_is_what_it_was_parsed_from(parts):
    written = "{text}".join(parts)
    assert Template.parse(written).literals == tuple(parts)
    assert str(Template.parse(written)) == written


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Rewrite:", r"'Rewrite:' has no \{text\}\..*or one of \[.*'springer', 'topic', 'topic-zh'\]"),
        ("{text} {0}", r"has braces other than \{text\}\..*Remove the others\."),
        ("{text.__class__}{text}", r"has braces other than \{text\}"),
        ("{{text}}", r"has braces other than \{text\}"),
        ("{text}{prepend}", r"may have one \{prepend\}, and have it before \{text\}"),
        ("{prepend}{prepend}{text}", r"may have one \{prepend\}, and have it before \{text\}"),
        ("x" * 2_000_000 + "{text}", r"characters of templates were given, and at most 65,536 are allowed"),
        (3, "template must be a string, but 3 was given"),
    ],
)
def test_what_is_no_template(template, message):
    with pytest.raises(ValueError, match=message):
        Template.parse(template)


def assert_same(one, other):
    assert all(torch.equal(part, other.features()[name]) for name, part in one.features().items())


@each_kind
class TestLayout:
    @given(
        batch=st.lists(texts, min_size=1, max_size=4),
        parts=st.lists(literals, min_size=2, max_size=4),
        prompt=literals,
        limit=st.none() | st.integers(1, 8),
    )
    def test_everything_stands_where_it_should(self, kind, batch, parts, prompt, limit):
        inner = TOKENIZERS[kind]

        def ids(text):
            return inner(text, add_special_tokens=False)["input_ids"] if text else []

        settings = {"tokenization": "pieces", "max_tokens": limit, "prompt": prompt}
        layout = laid_out(Template(tuple(parts)), inner, batch, **settings)
        before, after = special_tokens(inner)
        for row, text in enumerate(batch):
            own = ids(text)[:limit]
            expected = before + ids(prompt) + ids(parts[0])
            copies = [-1] * len(expected)
            for copy, literal in enumerate(parts[1:]):
                expected = expected + own + ids(literal)
                copies += [copy] * len(own) + [-1] * len(ids(literal))
            expected = expected + after
            copies += [-1] * len(after)
            length = len(expected)
            assert layout.input_ids[row, :length].tolist() == expected
            assert layout.copy_index[row, :length].tolist() == copies
            assert layout.attention_mask[row].tolist() == [1] * length + [0] * (layout.input_ids.shape[1] - length)
            assert (layout.copy_index[row, length:] == -1).all()
            assert layout.text_lengths[row] == len(own)

    @given(
        batch=st.lists(st.tuples(texts, literals), min_size=1, max_size=4),
        template=st.lists(literals, min_size=2, max_size=4),
    )
    def test_each_row_is_what_it_is_alone(self, kind, batch, template):
        """With a prompt of its own, without the columns that it does not need, and woven with another layout's rows."""
        parsed = Template(tuple(template))
        texts, prompts = zip(*batch, strict=True)
        whole = laid_out(parsed, TOKENIZERS[kind], texts, prompt=prompts)
        twice = laid_out("{text}{text}", TOKENIZERS[kind], texts)
        woven = Layout.interleaved([whole, twice])
        for row, (text, prompt) in enumerate(batch):
            alone = laid_out(parsed, TOKENIZERS[kind], [text], prompt=prompt)
            assert_same(whole.part(slice(row, row + 1)), alone)
            assert_same(woven.part(slice(2 * row, 2 * row + 1)), alone)
            assert_same(woven.part(slice(2 * row + 1, 2 * row + 2)), twice.part(slice(row, row + 1)))
            assert whole.spans[row] == alone.spans[0]
            assert whole.text_starts[row] == alone.text_start

    def test_as_features_and_back(self, kind):
        """A change's companion travels with it; what was seen of a companion stays with its row."""
        batch = ["a cat", "the quick brown fox jumps"]
        companion = laid_out("x {text}", TOKENIZERS[kind], batch)
        whole = replace(laid_out("{text}", TOKENIZERS[kind], batch), companions={"steer": companion})
        features = whole.features()
        assert all(values.dtype == torch.int64 for values in features.values())
        again = Layout.of(features)
        assert again.attention_mask.dtype == torch.bool
        assert_same(again, whole)
        assert again.companions.keys() == {"steer"}
        assert_same(again.companions["steer"], companion)
        part = replace(whole, seen={"steer": torch.tensor([[1.0], [2.0]])}).part(slice(1, 2))
        assert part.seen["steer"].tolist() == [[2.0]]
        assert not part.companions

    def test_room(self, kind):
        template, text = "x {text} y {text}", "the quick brown fox " * 20
        around = frames([Template.parse(template)], TOKENIZERS[kind], "prompt")
        most, overhead = room(around, 40), around[0].overhead
        assert 2 * most + overhead <= 40 < 2 * (most + 1) + overhead
        for limit in (None, most, 100):
            layout = laid_out(template, TOKENIZERS[kind], [text], max_tokens=limit, positions=40, prompt="prompt")
            assert layout.text_lengths == most
            assert 39 <= layout.input_ids.shape[1] <= 40
        with pytest.raises(ValueError, match=f"^{overhead} tokens of prompt, .* no room for 2 copies of a text in the"):
            laid_out(template, TOKENIZERS[kind], [text], positions=overhead + 1, prompt="prompt")


def test_truncation_side_is_the_tokenizers_and_its_state_stays():
    """A fast tokenizer that is told to truncate keeps that as its state, which another thread may be using."""
    inner = tokenizer("bytes", truncation_side="left")
    layout = laid_out("{text}{text}", inner, ["the quick brown fox"], max_tokens=2)
    last = inner("the quick brown fox", add_special_tokens=False)["input_ids"][-2:]
    assert layout.input_ids.tolist() == [last + last]
    assert inner.backend_tokenizer.truncation is None


def rows(layout: Layout, row: int) -> tuple[list[int], list[int]]:
    real = layout.attention_mask[row].bool()
    return layout.input_ids[row, real].tolist(), layout.copy_index[row, real].tolist()


@pytest.mark.parametrize("kind", ["bytes", "bert"])
@pytest.mark.parametrize("last_only", [False, True])
@given(
    batch=st.lists(st.text("ab 我", max_size=12), min_size=1, max_size=4),
    length=st.integers(1, 6),
    copies=st.integers(1, 3),
    prompt=st.sampled_from(["", "ab"]),
)
def test_chunks_are_what_is_cut_by_hand(kind, last_only, batch, length, copies, prompt):
    inner = TOKENIZERS[kind]
    layout = laid_out("{text}", inner, batch, tokenization="pieces", prompt=prompt)
    front, *own = (inner(text, add_special_tokens=False)["input_ids"] if text else [] for text in (prompt, *batch))
    before = special_tokens(inner)[0] + front
    expected = {}
    for text, ids in enumerate(own):
        chunks = [ids[first : first + length] for first in range(0, len(ids), length)] or [[]]
        for number, chunk in enumerate(chunks):
            if not last_only or number == len(chunks) - 1:
                copy_index = [copy for copy in range(copies) for _ in chunk]
                expected[text, number] = before + chunk * copies, [-1] * len(before) + copy_index
    if not any(own):
        # Where a text would begin is not known if there is none, and nothing is read.
        expected = {key: ([], []) for key in expected}

    found = repeated_chunks(layout, length, copies, last_only)
    keys = list(zip(found.text.tolist(), found.number.tolist(), strict=True))
    assert {key: rows(found.layout, row) for row, key in enumerate(keys)} == expected
    assert len(keys) == len(expected)
    assert (found.layout.text_lengths.diff() <= 0).all()
    padding = found.layout.attention_mask == 0
    assert (found.layout.copy_index[padding] == -1).all()
    assert not found.layout.input_ids[padding].any()
