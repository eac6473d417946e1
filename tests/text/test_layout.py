"""Templates, and the layouts of texts in them: ids and spans as tokenizers of several builds give them.

A text in its prompt is one string to the tokenizer, or pieces where its tokens are to be the same in several places.
"""

from __future__ import annotations

import io
import json
from itertools import chain

import pytest
import sentencepiece
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

import st_reba
from st_reba.text.layout import NOT_TEXT, PREPENDED, Layout
from st_reba.text.layouter import TextLayouter
from st_reba.text.presets import PRESETS, TEMPLATES, normalized
from st_reba.text.templates import MAX_TEMPLATE_LENGTH, Template
from st_reba.text.tokens import cut, separator, special_tokens, tokenize

from ..backbones import TEXTS, tokenizer


def lay_out(templates, tokenizer, texts, *, prompt="", max_tokens=None, positions=None, tokenization="whole"):
    """Layouts of texts behind a prompt, or behind one each."""
    whole = tokenization == "whole" and templates[0].copies == 1
    prompts = [prompt] * len(texts) if isinstance(prompt, str) else prompt
    return TextLayouter(tokenizer, templates, whole=whole, positions=positions)(texts, prompts, max_tokens or 2**30)


def laid_out(template, tokenizer, texts, **settings) -> Layout:
    parsed = Template.parse(template) if isinstance(template, str) else template
    [layout] = lay_out([parsed], tokenizer, texts, **settings)
    return layout


def text_lengths(layout):
    return (layout.copy_index == 0).sum(dim=1)


TOKENIZERS = {kind: tokenizer(kind) for kind in ("bytes", "bert", "sentencepiece")}

#: Also with braces.
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.just("{text} {0} {text.__class__}")
literals = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}"), max_size=12)


NORMALISED = [
    ("", ""), ("\n\t", "\n\t"), ("A cat sat", "A cat sat."), ("A cat sat.", "A cat sat."),
    ("A cat sat!", "A cat sat!."), ("Did it sit?", "Did it sit."), ("Did it? Yes", "Did it? Yes."),
    ('He said "sit"', "He said 'sit'"), ('"Sit?" he said', "'Sit?' he said."), ("A cat 🥊", "A cat 🥊."),
    ("我爱猫", "我爱猫。"), ("我爱猫！", "我爱猫！。"), ("你爱猫吗？", "你爱猫吗。"),
    ("他说：“你好”", "他说：‘你好’"), ("我爱 cats", "我爱 cats."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), NORMALISED)
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
    assert Template.parse("Of {prepend} {text}").literals == ("Of {prepend} ", "")
    assert Template.parse("x" * (MAX_TEMPLATE_LENGTH - 6) + "{text}").copies == 1


@given(st.lists(literals, min_size=2, max_size=5))
def test_a_template_is_what_it_was_parsed_from(parts):
    written = "{text}".join(parts)
    assert Template.parse(written).literals == tuple(parts)
    assert str(Template.parse(written)) == written


NO_TEMPLATES = [
    ("Rewrite:", r"'Rewrite:' has no \{text\}\..*or one of \[.*'springer', 'topic', 'topic-zh'\]"),
    ("{text} {0}", r"has other braces than \{text\}, one \{prompt\}, and one .*Remove the others\."),
    ("{text.__class__}{text}", r"has other braces than \{text\}"),
    ("{text}{prepend}", r"one \{prepend\} before \{text\}"),
    ("{pro{prepend}mpt}{text}", r"has other braces than \{text\}"),
    ("{pre{text}pend}", r"has other braces than \{text\}"),
    ("{prompt} {prompt}{text}", r"one \{prompt\}"),
    ("x" * 2_000_000 + "{text}", r"characters of templates were given, and at most 65,536 are allowed"),
    (3, "template must be a string, but 3 was given"),
]


@pytest.mark.parametrize(("template", "message"), NO_TEMPLATES)
def test_what_is_no_template(template, message):
    with pytest.raises(ValueError, match=message):
        Template.parse(template)


def assert_same(one, other):
    assert all(torch.equal(part, other.features()[name]) for name, part in one.features().items())


@pytest.mark.parametrize("kind", TOKENIZERS)
class TestLayout:
    @given(
        batch=st.lists(any_text, min_size=1, max_size=4),
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
            assert text_lengths(layout)[row] == len(own)

    @given(
        batch=st.lists(st.tuples(any_text, literals), min_size=1, max_size=4),
        template=st.lists(literals, min_size=2, max_size=4),
    )
    def test_each_row_is_what_it_is_alone(self, kind, batch, template):
        """With a prompt of its own, without the columns that it does not need."""
        parsed = Template(tuple(template))
        texts, prompts = zip(*batch, strict=True)
        whole = laid_out(parsed, TOKENIZERS[kind], texts, prompt=prompts)
        for row, (text, prompt) in enumerate(batch):
            alone = laid_out(parsed, TOKENIZERS[kind], [text], prompt=prompt)
            assert_same(whole.part(torch.tensor([row])), alone)
            assert whole.spans[row] == alone.spans[0]
            assert bool(whole.is_empty[row]) == bool(alone.is_empty[0])

    def test_as_features_and_back(self, kind):
        """The second of a module's layouts has names of its own, which no trainer takes for a column."""
        batch = ["a cat", "the quick brown fox jumps"]
        layouts = [laid_out(template, TOKENIZERS[kind], batch) for template in ("{text}", "x {text}")]
        features = {name: part for number, own in enumerate(layouts) for name, part in own.features(number).items()}
        assert all(values.dtype == torch.int64 for values in features.values())
        assert not [name for name in features if name.endswith("_input_ids")]
        for number, layout in enumerate(layouts):
            again = Layout.from_features(features, number)
            assert again.attention_mask.dtype == torch.bool
            assert_same(again, layout)


def test_truncation_side_is_the_tokenizers_and_its_state_stays():
    """A fast tokenizer that is told to truncate keeps that as its state, which another thread may be using."""
    inner = tokenizer("bytes", truncation_side="left")
    layout = laid_out("{text}{text}", inner, ["the quick brown fox"], max_tokens=2)
    last = inner("the quick brown fox", add_special_tokens=False)["input_ids"][-2:]
    assert layout.input_ids.tolist() == [last + last]
    assert inner.backend_tokenizer.truncation is None


_SAMPLE = [*TEXTS, *(template.replace("{text}", text) for template in TEMPLATES.values() for text in TEXTS[:3])]
_LLAMA_3 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _llama_3():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    inner.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|begin|>"]
    inner.train_from_iterator(_SAMPLE, trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))  # fmt: skip
    begin = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token="<|begin|>")


def _byte_fallback():
    """Vocabulary and merges of a BPE of blanks and ASCII, with a token for every byte."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ascii_only = ["".join(c for c in text if c.isascii()) for text in _SAMPLE]
    inner.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=600, special_tokens=specials,
                                                              show_progress=False))  # fmt: skip
    model = json.loads(inner.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _legacy(vocab, merges):
    """Llama 2's as older releases wrote it: a mark is put before every stretch between special tokens."""
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _slow(tmp_path_factory):
    """SentencePiece itself, which does not say where its tokens lie."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(c for c in text if c.isascii()) for text in _SAMPLE), model_writer=written,
        vocab_size=400, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("slow") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return SentencePieceBackend(vocab_file=str(path), special_tokens_pattern="bos", **names)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    vocab, merges = _byte_fallback()
    llama = LlamaTokenizer(vocab=vocab, merges=merges)
    llama.add_bos_token = True
    return {
        "llama-3": _llama_3(),
        "greedy": tokenizer("greedy"),
        "llama-2": llama,
        "llama-2 legacy": _legacy(vocab, merges),
        "sentencepiece": _slow(tmp_path_factory),
    }


KINDS = ("llama-3", "greedy", "llama-2", "llama-2 legacy", "sentencepiece")

PARTS = ["I", "love", " ", '"', "。", "自然语言", "é", "🥊", "\n", "dog", ".", ","]
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.lists(st.sampled_from(PARTS), max_size=8).map("".join),
    st.sampled_from(TEXTS),
)
fronts = st.sampled_from(["", "query: ", "文本：", "x"])
templates = st.sampled_from(["{text}", "sentence {text}", "a{text}b", *map(TEMPLATES.get, ("prompteol", "compress"))])


#: Byte-level tokenizers' letters: printable bytes stand for themselves, the others for letters from 256 on.
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PLAIN]
LETTERS = {**{chr(byte): byte for byte in PLAIN}, **{chr(256 + n): byte for n, byte in enumerate(OTHERS)}}


def spelled(tokenizer, kind, ids):
    """The bytes of each token."""
    for piece in tokenizer.convert_ids_to_tokens(ids):
        if kind in ("llama-3", "greedy"):
            yield bytes(LETTERS[letter] for letter in piece)
        elif piece.startswith("<0x"):
            yield bytes.fromhex(piece[3:5])
        else:
            yield piece.replace("▁", " ").encode()


def expected(tokenizer, kind, front, text, behind):
    """The whole string's ids, as the tokenizer gives them, and which of them hold any byte of the text."""
    plain = tokenizer(front + text + behind, add_special_tokens=False)["input_ids"]
    before, after = len(front.encode()), len((front + text).encode())
    whole = b"".join(spelled(tokenizer, kind, plain))
    position = len((front + text + behind).encode()) - len(whole)
    assert position in (0, -1)
    assert whole[-position:] == (front + text + behind).encode()
    marks = []
    for part in spelled(tokenizer, kind, plain):
        start, stop = position, position + len(part)
        position = stop
        # A byte of a character is its whole character, for text never ends within one.
        marks.append(start < after and (stop > before or (not front and stop <= 0)))
    return plain, marks


@pytest.mark.parametrize("kind", KINDS)
class TestWholes:
    @given(text=texts, prompt=fronts, template=templates)
    @example(text="I love dogs", prompt="", template=TEMPLATES["prompteol"])
    @example(text=" a ", prompt="", template="a{text} means")
    def test_the_whole_strings_ids(self, kind, tokenizers, text, prompt, template):
        own = tokenizers[kind]
        assume(own(text, add_special_tokens=False)["input_ids"] and not set(text) & set("▁<"))
        lead, behind = template.split("{text}")
        plain, marks = expected(own, kind, prompt + lead, text, behind)
        layout = laid_out(template, own, [text], prompt=prompt)
        full = own(prompt + template.replace("{text}", text))["input_ids"]
        assert layout.input_ids[0].tolist() == full
        specials = len(full) - len(plain)
        assert (layout.copy_index[0, specials:] == 0).tolist() == marks
        assert (layout.copy_index[0, :specials] == NOT_TEXT).all()

    @given(
        text=texts, prompt=fronts, template=templates, max_tokens=st.integers(1, 9),
        side=st.sampled_from(["left", "right"]),
    )  # fmt: skip
    def test_a_text_is_cut_and_nothing_else(self, kind, tokenizers, text, prompt, template, max_tokens, side):
        own = tokenizers[kind]
        ids = own(text, add_special_tokens=False)["input_ids"]
        assume(ids and not set(text) & set("▁<"))
        layouter = TextLayouter(own, [Template.parse(template)], whole=True, positions=None)
        [frame] = layouter.frames(prompt)
        positions = len([*layouter.before, *chain(*frame.literals), *layouter.after]) + max_tokens
        own.truncation_side = side
        try:
            layout = laid_out(template, own, [text], max_tokens=max_tokens, positions=positions, prompt=prompt)
        finally:
            own.truncation_side = "right"
        found = layout.input_ids[0].tolist()
        assert len(found) <= positions
        assert 1 <= text_lengths(layout)[0] <= max_tokens
        lead, behind = template.split("{text}")
        parts = [text[start:] if side == "left" else text[: len(text) - start] for start in range(len(text))]
        wholes = [own(prompt + lead + part + behind)["input_ids"] for part in parts]
        first = ids[-max_tokens:] if side == "left" else ids[:max_tokens]
        before, leading, following = (
            own(string, add_special_tokens=False)["input_ids"] if string else [] for string in (prompt, lead, behind)
        )
        in_pieces = [*special_tokens(own)[0], *before, *leading, *first, *following]
        assert found in [*wholes, in_pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_cut_alike_in_several_layouts(kind, tokenizers):
    own = tokenizers[kind]
    templates = [Template.parse(template) for template in ('"{text}"', "{text}", "Of {text}, a")]
    batch = ["I love natural language processing.", "我爱自然语言处理。", "", '"I love', "dogs"]
    for max_tokens in (1, 4, 7, 40):
        limits = {"max_tokens": max_tokens, "positions": max_tokens + 12}
        layouts = lay_out(templates, own, batch, **limits)
        for number, text in enumerate(batch):
            of_text = [layout.spans[number] for layout in layouts]
            assert len({(spans[0][0], spans[-1][1]) for spans in of_text if spans}) == (text != "")
            alone = lay_out(templates, own, [text], **limits)
            assert of_text == [layout.spans[0] for layout in alone]
            for layout, other in zip(layouts, alone, strict=True):
                assert_same(layout.part(torch.tensor([number])), other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [' The "cat" 自🥊  é\n', "自然 🥊"])
def test_spans_and_cuts(kind, text, tokenizers):
    """No character is cut through."""
    [tokens] = tokenize(tokenizers[kind], [text])
    spelled_out = list(spelled(tokenizers[kind], kind, tokens.ids))
    position = len(text.encode()) - sum(map(len, spelled_out))
    for (first, last), part in zip(tokens.spans, spelled_out, strict=True):
        begin, position = max(position, 0), position + len(part)
        assert len(text[:first].encode()) <= begin
        assert len(text[:last].encode()) >= position
    assert tokens.spans[-1][1] == len(text)
    for count in range(len(tokens.ids) + 1):
        # Tokens that are not kept hold nothing of the characters that are, and one character more would be too many.
        start, stop = cut(text, tokens.spans, count, "right")
        assert start == 0
        assert all(first >= stop for first, _ in tokens.spans[count:])
        assert stop == len(text) or any(first <= stop < last for first, last in tokens.spans[count:])
        start, stop = cut(text, tokens.spans, count, "left")
        assert stop == (len(text) if count else 0)
        assert not count or all(last <= start for _, last in tokens.spans[:-count])


def test_tokens_that_do_not_spell_the_text(tokenizers):
    """A slow tokenizer that reads an unknown character, or a special token within the text: in pieces."""
    own = tokenizers["sentencepiece"]
    text = "x</s>a"
    assert tokenize(own, [text])[0].spans is None
    layout = laid_out("sentence {text}", own, [text, "dog"])
    parts = [own(part, add_special_tokens=False)["input_ids"] for part in ("sentence ", text)]
    length = 1 + len(parts[0]) + len(parts[1])
    assert layout.input_ids[0, :length].tolist() == [1, *parts[0], *parts[1]]
    assert layout.input_ids[1, layout.attention_mask[1] == 1].tolist() == own("sentence dog")["input_ids"]


@pytest.mark.parametrize("kind", ["greedy", "sentencepiece"])
def test_half_of_a_surrogate_pair(kind, tokenizers):
    with pytest.raises(ValueError, match=r"half of a surrogate pair, '\\ud800', as its character 3 of 4"):
        tokenize(tokenizers[kind], ["a", "ab\ud800c"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_splits_the_string(kind, tokenizers):
    """Also of a text that looks like the separator."""
    own = tokenizers[kind]
    entry = separator(own) if own.is_fast else ""
    for text in (f"a{entry}b", "I love 自🥊", ' "'):
        layout = laid_out('This sentence : {prepend} "{text}" means', own, [text], prompt=f"{entry}: ")
        [slot] = (layout.copy_index[0] == PREPENDED).nonzero().flatten().tolist()
        ids = layout.input_ids[0].tolist()
        assert ids[:slot] == own(f"{entry}: This sentence : ")["input_ids"]
        if own.is_fast:
            # What stands behind an entry that is added to the vocabulary, as the authors' code has one.
            added = "</s>" if "llama-2" in kind else "<|end|>"
            assert ids[slot + 1 :] == own(f'{entry}: This sentence : {added} "{text}" means')["input_ids"][slot + 1 :]


class _Wrapped:
    """A slow tokenizer whose ids another function makes."""

    is_fast = False

    def __init__(self, plain, full):
        self.plain, self.full, self.all_special_ids, self.size = plain, full, [9], 20

    def __len__(self):
        return self.size

    def decode(self, ids):
        return f"word{ids[0]}"

    def __call__(self, texts, add_special_tokens=True):
        ids = [self.plain(text) for text in texts]
        return {"input_ids": [self.full(own) for own in ids] if add_special_tokens else ids}


def test_special_tokens(tokenizers):
    own = tokenizers | {kind: tokenizer(kind) for kind in ("bytes", "bert", "unigram")}
    specials = {"bert": ([2], [3]), "unigram": ([1], []), "llama-2": ([1], []), "sentencepiece": ([1], [])}
    for kind in ("bytes", "greedy", *specials):
        assert special_tokens(own[kind]) == specials.get(kind, ([], [])), kind


def test_special_tokens_where_a_letter_has_no_tokens():
    """A BOS stands before the text, whatever the tokenizer makes of the letter a."""
    inner = Tokenizer(models.BPE({"<s>": 0, "x": 1, "y": 2}, []))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    assert own("a")["input_ids"] == [0]
    assert special_tokens(own) == ([0], [])
    assert laid_out("{text}", own, ["yax"]).input_ids.tolist() == [[0, 2, 1]]


def test_special_tokens_where_a_letter_is_one():
    """The letter a is BOS's id, too: the letters behind it tell on which side BOS stands."""
    assert special_tokens(_Wrapped(lambda text: [5, 6], lambda ids: [5, *ids])) == ([5], [])
    assert special_tokens(_Wrapped(lambda text: [6, 5], lambda ids: [*ids, 5])) == ([], [5])


UNCLEAR_SPECIALS = [
    (lambda text: [5] * (1 + len(text) % 3), lambda ids: [5, *ids], "special tokens cannot be told from the text"),
    (lambda text: [5], lambda ids: [9, 9], r"reads 'a b c 1 \?' as \[9, 9\] with special tokens and as \[5\]"),
    (lambda text: [len(text)], lambda ids: [ids[0] + 10, *ids], r"or are others than around other texts. Use a"),
    (lambda text: [], lambda ids: [9, *ids], "gives no tokens for any text that was tried"),
]


@pytest.mark.parametrize(("plain", "full", "message"), UNCLEAR_SPECIALS)
def test_special_tokens_that_cannot_be_told(plain, full, message):
    with pytest.raises(ValueError, match=message):
        special_tokens(_Wrapped(plain, full))


# Texts in prompts, read by modules


@pytest.mark.parametrize("module_class", [st_reba.EchoModule, st_reba.ReBAModule])
def test_repeated_texts_are_in_pieces(module_class, shared):
    assert module_class(shared()).tokenization == "pieces"
    with pytest.raises(ValueError, match="tokenization='whole': the same tokens are put into several slots"):
        module_class(shared(), tokenization="whole")
    with pytest.raises(ValueError, match="tokenization='all': use 'whole' or 'pieces'"):
        st_reba.CausalTransformer(shared(), tokenization="all")


# A template's name brings how its authors read it; what the caller or a saved model says comes first.


def reading(module):
    return module.pool_over, module.rows, module.normalize_text, module.output_layer, module.final_norm


def test_a_prompt_is_read_at_its_end(shared):
    for template in [name for name, preset in PRESETS.items() if preset.rows == "last"]:
        module = st_reba.CausalTransformer(shared(), template=template)
        layer, norm = (2, False) if template.startswith(("pretended-cot", "knowledge")) else (None, True)
        assert module.template == TEMPLATES[template]
        # PromptReps asks for a word that is to be found as it is written, and PonTE's paper says nothing of changes.
        assert reading(module) == ("all", "last", not template.startswith(("promptreps", "ponte")), layer, norm)


def test_the_very_last_token_is_read(shared):
    """That which the tokenizer puts behind the template, as it does for everybody."""
    module = st_reba.CausalTransformer(shared("llama", "bert"), template="prompteol")
    for prompt in (None, "query: "):
        assert module(module.preprocess(TEXTS, prompt=prompt))["input_ids"].tolist() == [[3]] * len(TEXTS)


def test_what_the_caller_says_comes_first(shared):
    given = {"pool_over": "text", "rows": "all", "normalize_text": False, "output_layer": -1, "final_norm": True}
    module = st_reba.CausalTransformer(shared(), template="pretended-cot", **given)
    assert reading(module) == ("text", "all", False, 3, True)
    # A model of one layer has no last but one.
    backbone = st_reba.CausalTransformer(shared(), output_layer=1)
    assert st_reba.CausalTransformer(backbone, template="pretended-cot").output_layer == 1
    # The text of a preset is read as any template: saved models have texts.
    module = st_reba.CausalTransformer(shared(), template=TEMPLATES["pretended-cot"])
    assert reading(module) == ("text", "all", False, None, True)


def test_what_each_module_takes_of_a_preset(shared):
    """What every layer, or the attention in it, gives is not read at the last but one; a hybrid reads more than the
    last token."""
    states = st_reba.LayerStates(shared(), template="pretended-cot")
    assert (states.depth, states.pool_over, states.normalize_text, states.final_norm) == (3, "all", True, True)
    values = st_reba.ValueAggregationModule(shared(), template="pretended-cot")
    assert (values.output_layer, values.pool_over, values.normalize_text) == (None, "all", True)
    hybrid = st_reba.KVReroutingModule(shared(), template="prompteol")
    assert (hybrid.hybrid, hybrid.rows, hybrid.pool_over, hybrid.normalize_text) == (True, "all", "all", True)
    assert reading(st_reba.TokenPrependingModule(shared())) == ("all", "last", True, 3, False)
    # Several prompts take what all agree on.
    for templates, expected in (
        (["pretended-cot", "knowledge"], (2, False, True)),
        (["prompteol", "pretended-cot"], (None, True, True)),
        (["prompteol", "{text} sounds"], (None, True, False)),
    ):
        module = st_reba.MetaEOLModule(shared(), templates=templates)
        assert (module.output_layer, module.final_norm, module.normalize_text) == expected
