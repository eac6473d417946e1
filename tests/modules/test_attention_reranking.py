"""In-context reranking: against the stored maps of whole prompts, and what must not change a score."""

import math

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModel

from st_reba import AttentionReranker, AttentionRerankModule

from .. import backbones
from ..backbones import TEXTS
from ..conftest import long

TEMPLATE = "Of:{documents}\nFor {query}:"
QUERY = "Who chased the dog?"
DOCUMENTS = [TEXTS[2], "the quick brown fox jumps over the lazy dog", TEXTS[1], "a", "bank bank river money"]
EVERY_HEAD = [[layer, head] for layer in range(3) for head in range(4)]
INTERFACE = [
    name if name in ("llama", "gemma2_softcap", "gpt2", "mixtral_experts") else long(name)
    for name in backbones.ARCHITECTURES
    if name not in backbones.OWN_ATTENTION
]


def in_context_scores(model, front, separator, documents, asked, heads, apart=False):
    """In-context reranking (arXiv:2410.02642): the score of each document, from the stored maps of two whole prompts.

    ``asked`` are the tokens of the query, and of the query without content, each with which of them count; ``heads``
    the pairs of a layer and a head that count. With ``apart``, a document sees what stands before all documents and
    itself, from the same position on, and the query stands behind the longest.
    """
    paid = []
    for query, counts in asked:
        ids, positions, owners = [*front], [*range(len(front))], [-1] * len(front)
        for number, document in enumerate(documents):
            first = len(front) if apart else len(ids)
            positions += range(first, first + len(separator) + len(document))
            ids += [*separator, *document]
            owners += [number] * (len(separator) + len(document))
        behind = max(positions) + 1
        rows = [len(ids) + place for place, own in enumerate(counts) if own]
        ids, owners = [*ids, *query], [*owners, *[len(documents)] * len(query)]
        positions += range(behind, behind + len(query))
        given = {}
        if apart:
            size = len(ids)
            mask = torch.full((1, 1, size, size), torch.finfo(torch.float32).min)
            for token in range(size):
                for other in range(token + 1):
                    if owners[other] in (-1, owners[token]) or owners[token] == len(documents):
                        mask[0, 0, token, other] = 0
            given = {"attention_mask": mask, "position_ids": torch.tensor([positions])}
        maps = model(input_ids=torch.tensor([ids]), output_attentions=True, **given).attentions
        paid.append(sum(maps[layer][0, head, rows].mean(dim=0) for layer, head in heads))
    scores, reached = [], len(front)
    for document in documents:
        reached += len(separator)
        tokens = [float(paid[0][place] - paid[1][place]) for place in range(reached, reached + len(document))]
        reached += len(document)
        least = np.mean(tokens) - 2 * np.std(tokens, ddof=1) if len(tokens) > 1 else -math.inf
        scores.append(sum(token for token in tokens if token > least))
    return scores


def made(path, **more):
    module = AttentionRerankModule(path, **{"template": TEMPLATE, "layers": "all", "together": False, **more})
    return AttentionReranker(modules=[module], device="cpu")


def scores(reranker, documents=DOCUMENTS, query=QUERY):
    return reranker.predict([(query, document) for document in documents])


def expected(path, module, heads=EVERY_HEAD, apart=False, documents=DOCUMENTS):
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    features = module.preprocess([(QUERY, document) for document in documents])
    parts = (features[name] for name in ("front", "separator", "documents", "asked"))
    with torch.no_grad():
        return in_context_scores(model, *parts, heads, apart)


class TestEqualsTheStoredMaps:
    @pytest.mark.parametrize("architecture", INTERFACE)
    def test_of_documents_read_together(self, architecture, backbone_path):
        reranker = made(backbone_path(architecture), together=True)
        assert scores(reranker) == pytest.approx(expected(backbone_path(architecture), reranker[0]), abs=1e-5)

    ALONE = [("llama", "greedy"), ("qwen2", "bytes"), ("gpt2", "bert"), ("gpt_neox", "sentencepiece"), ("opt", "bytes")]

    @pytest.mark.parametrize(("architecture", "kind"), ALONE)
    def test_of_documents_read_alone(self, architecture, kind, backbone_path):
        path = backbone_path(architecture, kind)
        reranker = made(path)
        assert scores(reranker) == pytest.approx(expected(path, reranker[0], apart=True), abs=1e-5)

    LAYERS_AND_HEADS = [
        ({"layers": [-2]}, EVERY_HEAD[4:8]),
        ({"layers": [0, 2]}, EVERY_HEAD[:4] + EVERY_HEAD[8:]),
        ({"heads": [[1, 3], [0, 2]]}, [[1, 3], [0, 2]]),
    ]

    @pytest.mark.parametrize(("asked", "heads"), LAYERS_AND_HEADS)
    def test_of_some_layers_and_heads(self, asked, heads, backbone_path):
        """The layers above the last of them are not run."""
        reranker = made(backbone_path(), together=True, **asked)
        assert scores(reranker) == pytest.approx(expected(backbone_path(), reranker[0], heads), abs=1e-5)
        assert reranker[0].model.config.num_hidden_layers == max(layer for layer, _ in heads) + 1

    def test_the_middle_of_a_model_and_of_one_with_windows_the_layers_without(self, backbone_path, tmp_path):
        deep = backbones.save(backbones.backbone("llama", num_hidden_layers=9), tmp_path)
        assert made(deep, layers="middle")[0].layers == [2, 3, 4, 5]
        assert made(backbone_path("gemma3"), layers="middle")[0].layers == [1]

    def test_rotations_are_means_over_where_the_list_begins(self, backbone_path):
        once = made(backbone_path(), together=True)
        found = [np.roll(scores(once, DOCUMENTS[first:] + DOCUMENTS[:first]), first) for first in range(5)]
        rotated = made(backbone_path(), together=True, rotations=5)
        assert scores(rotated) == pytest.approx(np.mean(found, axis=0), abs=1e-5)

    def test_the_queries_tokens_are_those_that_hold_its_characters_and_what_follows(self, backbone_path):
        module = made(backbone_path())[0]
        ((ids, own), (nothing, _)) = module.preprocess([(QUERY, "a")])["asked"]
        assert module.tokenizer.decode([token for token, counts in zip(ids, own, strict=True) if counts]) in (
            f"{QUERY}:", f" {QUERY}:",
        )  # fmt: skip
        assert module.tokenizer.decode(nothing) == "\nFor N/A:"


class TestWhatChangesNoScore:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3"])
    def test_the_order_of_documents_that_are_read_alone(self, architecture, backbone_path):
        reranker = made(backbone_path(architecture))
        assert scores(reranker, DOCUMENTS[::-1]) == pytest.approx(scores(reranker)[::-1], abs=1e-5)

    def test_what_other_queries_are_asked_at_a_time(self, backbone_path):
        reranker = made(backbone_path(), together=True)
        mixed = [(query, document) for document in DOCUMENTS for query in (QUERY, "river")]
        found = reranker.predict(mixed)
        assert found[::2] == pytest.approx(scores(reranker), abs=1e-6)
        assert found[1::2] == pytest.approx(scores(reranker, query="river"), abs=1e-6)

    def test_a_document_without_tokens_has_no_score_and_leaves_the_others_theirs(self, backbone_path):
        *found, nothing = scores(made(backbone_path()), [*DOCUMENTS[:2], ""])
        assert nothing == 0
        assert all(found)


class TestBlocks:
    def test_of_one_document_are_documents_read_alone(self, backbone_path):
        """Blocks stand side by side, and the query is read behind all of them: one softmax."""
        blocks = made(backbone_path(), together=True, block_tokens=1)
        assert scores(blocks) == pytest.approx(scores(made(backbone_path())), abs=1e-5)

    def test_a_list_beyond_the_models_positions_is_cut_into_blocks(self, backbone_path):
        reranker = made(backbone_path("gpt2"), together=True)
        many = DOCUMENTS * 6
        assert sum(map(len, reranker[0].preprocess([(QUERY, each) for each in many])["documents"])) > 256
        found = scores(reranker, many)
        assert np.isfinite(found).all()
        assert len(set(found.tolist())) > len(DOCUMENTS)

    def test_a_long_document_is_cut_and_the_query_is_not(self, backbone_path):
        module = made(backbone_path(), max_seq_length=4)[0]
        assert [len(ids) for ids in module.preprocess([(QUERY, "dog " * 50), (QUERY, "a")])["documents"]] == [4, 1]
        module.tokenizer.truncation_side = "left"
        last = module.tokenizer("g h i j", add_special_tokens=False)["input_ids"][-4:]
        assert module.preprocess([(QUERY, "a b c d e f g h i j")])["documents"] == [last]
        module = made(backbone_path())[0]
        features = module.preprocess([(QUERY, "dog " * 500)])
        whole = [*features["front"], *features["separator"], *features["documents"][0], *features["asked"][0][0]]
        assert len(whole) == backbones.POSITIONS
        with pytest.raises(ValueError, match="leave no room for a document in the model's 256 positions"):
            module.preprocess([("dog " * 500, "a")])


class TestAsACrossEncoder:
    def test_a_plain_cross_encoder_refuses_it(self, backbone_path, tmp_path):
        made(backbone_path()).save_pretrained(str(tmp_path))
        with pytest.raises(ValueError, match=r"Load it with st_reba\.AttentionReranker\(path\)"):
            CrossEncoder(str(tmp_path), device="cpu")

    def test_prompt_and_kinds_of_results(self, backbone_path):
        reranker, pairs = made(backbone_path()), [[QUERY, document] for document in DOCUMENTS]
        as_tensor = reranker.predict(pairs, convert_to_tensor=True, prompt="Task: order.\n")
        assert not np.allclose(as_tensor.numpy(), scores(reranker))
        assert np.allclose(reranker.predict(pairs, activation_fn=torch.neg), -scores(reranker))


class TestRefusals:
    SETTINGS = [
        ({"template": "{query}{documents}"}, "one {documents} and, behind it, one {query}"),
        ({"template": "{documents}{query}{x}"}, "no other braces"),
        ({"layers": "lowest"}, 'use "all" or a list of layer indices'),
        ({"layers": [3]}, r"has 3 layers, use -3 to 2, not \[3\]"),
        ({"heads": [[0]]}, "give a list of pairs of a layer and a head"),
        ({"heads": [[0, 4]]}, r"heads=\[\[0, 4\]\]: give .* 3 layers of 4 heads, counted from 0"),
        ({"rotations": 0}, "rotations=0: give a whole number from 1 to 64"),
        ({"rotations": 2}, "documents that are read alone have no order"),
        ({"block_tokens": 8}, "documents that are read alone have no order"),
    ]

    @pytest.mark.parametrize(("more", "message"), SETTINGS)
    def test_settings(self, more, message, backbone_path):
        with pytest.raises(ValueError, match=message):
            made(backbone_path(), **more)

    @pytest.mark.parametrize("architecture", ["bloom", "gpt_j"])
    def test_an_attention_that_is_not_seen(self, architecture, backbone_path):
        with pytest.raises(ValueError, match="does not call transformers' attention interface"):
            made(backbone_path(architecture))

    def test_what_is_no_list_of_one_query(self, backbone_path):
        reranker = made(backbone_path())
        assert scores(reranker, [*map(np.str_, DOCUMENTS)], np.str_(QUERY)) == pytest.approx(scores(reranker))
        for wrong in ([(QUERY, 3)], [(QUERY, "a", "b")]):
            with pytest.raises(ValueError, match="Input 0 is .*: give pairs of a query and a document"):
                reranker.predict(wrong)
        with pytest.raises(ValueError, match="2 queries were given: documents are scored for one query at a time"):
            reranker[0].preprocess([("a", "b"), ("b", "b")])
        with pytest.raises(ValueError, match="no AttentionRerankModule: build one that has"):
            AttentionReranker(backbone_path(), device="cpu").predict([(QUERY, "a")])
        with pytest.raises(ValueError, match="runs in one process"):
            reranker.predict([(QUERY, "a")], device=["cpu", "cpu"])
