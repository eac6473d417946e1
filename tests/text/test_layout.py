from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from st_reba.text.layout import Layout
from st_reba.text.layouts import frames, room
from st_reba.text.templates import MAX_TEMPLATE_LENGTH, TEMPLATES, Template, normalized
from st_reba.text.tokens import special_tokens

from ..backbones import tokenizer
from .layouts import laid_out

TOKENIZERS = {kind: tokenizer(kind) for kind in ("bytes", "bert", "sentencepiece")}
KINDS = sorted(TOKENIZERS)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
literals = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}"), max_size=12)


class TestNormalized:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", ""),
            (" ", " "),
            ("\n\t", "\n\t"),
            ("A cat sat", "A cat sat."),
            ("A cat sat.", "A cat sat."),
            ("A cat sat!", "A cat sat!."),
            ("Did it sit?", "Did it sit."),
            ("Did it? Yes", "Did it? Yes."),
            ('He said "sit"', "He said 'sit'"),
            ('"Sit?" he said', "'Sit?' he said."),
            ("the cats'", "the cats'"),
            ("A cat 🥊", "A cat 🥊."),
            ("我爱猫", "我爱猫。"),
            ("我爱猫。", "我爱猫。"),
            ("我爱猫！", "我爱猫！。"),
            ("你爱猫吗？", "你爱猫吗。"),
            ("他说：“你好”", "他说：‘你好’"),
            ("《猫》", "《猫》。"),
            ("我爱 cats", "我爱 cats."),
        ],
    )
    def test_as_released(self, text, expected):
        assert normalized(text) == expected

    @given(texts)
    def test_a_character_keeps_its_place(self, text):
        after = normalized(text)
        assert len(after) - len(text) in (0, 1)
        for before, now in zip(text, after, strict=False):
            assert now == before or before in '"“”?？'
        assert not set(after) & set('"“”') or not text.strip()


PROMPTS = ("prompteol", "pretended-cot", "knowledge", "promptsth", "promptsum", "compress", "compress-query")


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_have_chinese_counterparts(name):
    for preset in (name, f"{name}-zh"):
        assert Template.parse(preset).copies == 1
    # The English ones stand in quotation marks that normalisation keeps out of the text, and so do the Chinese ones.
    assert ('"{text}"' in TEMPLATES[name]) == ("“{text}”" in TEMPLATES[f"{name}-zh"])


def assert_same(one, other):
    assert all(torch.equal(part, other.features()[name]) for name, part in one.features().items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("templates", [["{text}"], ["a {text}", "{text} and so on", "{text}{text}"]])
def test_interleaved_layouts(kind, templates):
    batch = ["the quick brown fox", "a", ""]
    layouts = [laid_out(template, TOKENIZERS[kind], batch) for template in templates]
    woven = Layout.interleaved(layouts)
    for text in range(len(batch)):
        for number, layout in enumerate(layouts):
            row = woven.part(slice(text * len(layouts) + number, text * len(layouts) + number + 1))
            alone = layout.part(slice(text, text + 1))
            assert_same(row, alone)


class TestTemplate:
    def test_slots_and_literals(self):
        template = Template.parse("Rewrite: {text}, rewritten: {text}!")
        assert template.literals == ("Rewrite: ", ", rewritten: ", "!")
        assert template.copies == 2

    def test_presets_have_names(self):
        assert str(Template.parse("springer")) == TEMPLATES["springer"]

    def test_repeat(self):
        assert Template.repeat(3) == Template.parse("{text}{text}{text}")

    @given(st.lists(literals, min_size=2, max_size=5))
    def test_a_template_is_what_it_was_parsed_from(self, parts):
        written = "{text}".join(parts)
        assert Template.parse(written).literals == tuple(parts)
        assert str(Template.parse(written)) == written

    def test_without_a_slot(self):
        with pytest.raises(
            ValueError, match=r"'Rewrite:' has no \{text\}\..*or one of \[.*'springer', 'topic', 'topic-zh'\]"
        ):
            Template.parse("Rewrite:")

    @pytest.mark.parametrize(
        "template", ["{text} {0}", "{text.__class__}{text}", "{{text}}", "{text} }", "{text!r}{text}"]
    )
    def test_other_braces(self, template):
        with pytest.raises(ValueError, match=r"has braces other than \{text\}\..*Remove the others\."):
            Template.parse(template)

    @pytest.mark.parametrize("template", ["{text}{prepend}", "{prepend}{prepend}{text}", "{prepend}{text}{prepend}"])
    def test_one_slot_before_the_text(self, template):
        assert Template.parse("Of {prepend} {text}").literals == ("Of {prepend} ", "")
        with pytest.raises(ValueError, match=r"may have one \{prepend\}, and have it before \{text\}"):
            Template.parse(template)

    def test_a_template_of_megabytes(self):
        for template in ("x" * 2_000_000 + "{text}", "{text}" * 300_000):
            with pytest.raises(ValueError, match=r"characters of templates were given, and at most 65,536 are allowed"):
                Template.parse(template)
        assert Template.parse("x" * (MAX_TEMPLATE_LENGTH - 6) + "{text}").copies == 1

    def test_not_a_string(self):
        with pytest.raises(ValueError, match="template must be a string, but 3 was given"):
            Template.parse(3)


@pytest.mark.parametrize("kind", KINDS)
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
    def test_layouts_with_prompts_of_their_own(self, kind, batch, template):
        """Each row is what it is alone."""
        parsed = Template(tuple(template))
        texts, prompts = zip(*batch, strict=True)
        whole = laid_out(parsed, TOKENIZERS[kind], texts, prompt=prompts)
        for row, (text, prompt) in enumerate(batch):
            alone = laid_out(parsed, TOKENIZERS[kind], [text], prompt=prompt)
            assert_same(whole.part(slice(row, row + 1)), alone)
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

    def test_rows_drop_the_columns_nobody_needs(self, kind):
        batch = ["a cat", "the quick brown fox jumps over the lazy dog", "a"]
        whole = laid_out("{text}{text}", TOKENIZERS[kind], batch)
        for part in (slice(0, 1), slice(1, 3), slice(2, 3)):
            alone = laid_out("{text}{text}", TOKENIZERS[kind], batch[part])
            assert_same(whole.part(part), alone)

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


def test_truncation_side_is_the_tokenizers(monkeypatch):
    inner = tokenizer("bytes", truncation_side="left")
    layout = laid_out("{text}{text}", inner, ["the quick brown fox"], max_tokens=2)
    last = inner("the quick brown fox", add_special_tokens=False)["input_ids"][-2:]
    assert layout.input_ids.tolist() == [last + last]


@pytest.mark.parametrize("max_tokens", [2, None])
def test_the_tokenizer_is_left_as_it_is(max_tokens):
    """A fast tokenizer that is told to truncate keeps that as its state, which another thread may be using."""
    inner = tokenizer("bytes")
    laid_out("{text}{text}", inner, ["the quick brown fox"], max_tokens=max_tokens)
    assert inner.backend_tokenizer.truncation is None


def test_texts_with_braces_are_texts():
    text = "{text} {0} {text.__class__}"
    own = TOKENIZERS["bytes"](text)["input_ids"]
    assert laid_out("{text}{text}", TOKENIZERS["bytes"], [text]).input_ids.tolist() == [own + own]
