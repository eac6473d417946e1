"""Programs that share an environment, each given a path or a plain ``SentenceTransformer``: BERTopic (with scikit-learn
in place of UMAP and HDBSCAN, as its documentation offers), Haystack, KeyBERT, LlamaIndex, mteb, and OpenAI's client,
LangChain's and LlamaIndex's that are made of it, with a server in this process."""

from __future__ import annotations

import subprocess
import sys

import mteb
import numpy as np
import openai
import pytest
from bertopic import BERTopic
from datasets import Dataset
from haystack import Document
from haystack.utils import ComponentDevice
from haystack_integrations.components.embedders.sentence_transformers import (
    SentenceTransformersDocumentEmbedder,
    SentenceTransformersTextEmbedder,
)
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from mteb.abstasks import AbsTaskRetrieval
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from st_reba.serve.app import Server
from st_reba.serve.models import Embedder
from st_reba.serve.requests import Limits

from ..backbones import TEXTS
from ..conftest import PROMPTS
from ..serve.conftest import serving

QUERY = "Who chased the mouse?"
QUERIES = ["What is language processing?", QUERY]
#: Of two topics.
TOPICS = [
    f"{animal} chased the {other}" for animal in ("the dog", "a cat", "my horse") for other in ("mouse", "bird", "fox")
] + [f"{amount} in the {place}" for amount in ("money", "gold", "a loan") for place in ("bank", "market", "budget")]


@pytest.mark.parametrize(
    ("imports", "load"),
    [
        (
            "from haystack_integrations.components.embedders.sentence_transformers import "
            "SentenceTransformersTextEmbedder",
            "SentenceTransformersTextEmbedder(model=path{}).run(text='a')",
        ),
        (
            "from llama_index.embeddings.huggingface import HuggingFaceEmbedding",
            "HuggingFaceEmbedding(model_name=path{})",
        ),
        (
            "from chromadb.utils.embedding_functions import SentenceTransformerEmbeddingFunction",
            "SentenceTransformerEmbeddingFunction(path{})",
        ),
        ("from setfit import SetFitModel", "SetFitModel.from_pretrained(path{})"),
    ],
)
def test_without_the_import(imports, load, check_without_the_import):
    check_without_the_import(imports, load.format(""), load.format(", trust_remote_code=True"))


class Reduction(PCA):
    """Remembers the embeddings that it was given."""

    def fit_transform(self, X, y=None):  # noqa: N803 (scikit-learn's name)
        self.given_ = X
        return super().fit_transform(X, y)


def clustering() -> KMeans:
    return KMeans(n_clusters=2, n_init=3, random_state=0)


@pytest.mark.parametrize("by_path", [False, True])
def test_topics_of_bertopic(by_path, own, prompted_path):
    topics = BERTopic(
        embedding_model=prompted_path if by_path else own,
        umap_model=Reduction(n_components=2, random_state=0),
        hdbscan_model=clustering(),
    )
    found, _ = topics.fit_transform(TOPICS)
    assert np.array_equal(topics.umap_model.given_, own.encode(TOPICS))
    expected = clustering().fit_predict(Reduction(n_components=2, random_state=0).fit_transform(own.encode(TOPICS)))
    # Topics are numbered by size, clusters as they come.
    assert len(set(found)) == len(set(zip(found, expected, strict=True))) == 2
    # A text's topic is found again from its embedding.
    assert list(topics.transform(TOPICS[:3])[0]) == found[:3]


def test_bertopic_without_the_import(check_without_the_import):
    """BERTopic has no such flag: give it a loaded model."""
    fit = "BERTopic(embedding_model={}, umap_model=PCA(2), hdbscan_model=KMeans(2)).fit(texts)"
    check_without_the_import(
        "from bertopic import BERTopic\n"
        "from sentence_transformers import SentenceTransformer\n"
        "from sklearn.cluster import KMeans\n"
        "from sklearn.decomposition import PCA\n"
        f"texts = {TOPICS!r}",
        fit.format("path"),
        fit.format("SentenceTransformer(path, trust_remote_code=True)"),
    )


@pytest.fixture(scope="module")
def haystack(prompted_path):
    return {"model": prompted_path, "device": ComponentDevice.from_str("cpu"), "progress_bar": False}


def test_documents_and_a_query_of_haystack(haystack, own):
    embedder = SentenceTransformersDocumentEmbedder(**haystack, encode_kwargs={"prompt_name": "document"})
    found = embedder.run(documents=[Document(content=text) for text in TEXTS])["documents"]
    assert np.array_equal(np.float32([document.embedding for document in found]), own.encode_document(TEXTS))
    embedder = SentenceTransformersTextEmbedder(**haystack, encode_kwargs={"prompt_name": "query"})
    assert np.array_equal(np.float32(embedder.run(text=QUERY)["embedding"]), own.encode_query(QUERY))


def test_llama_index(prompted_path, own):
    """Unless it is told otherwise it normalizes; and its own empty prompts are stronger than those that are saved."""
    asked = {"query_instruction": PROMPTS["query"], "text_instruction": PROMPTS["document"]}
    client = HuggingFaceEmbedding(model_name=prompted_path, device="cpu", normalize=False, **asked)
    assert np.array_equal(np.float32(client.get_text_embedding_batch(TEXTS)), own.encode_document(TEXTS))
    assert np.array_equal(np.float32(client.get_query_embedding(QUERY)), own.encode_query(QUERY))
    client = HuggingFaceEmbedding(model_name=prompted_path, device="cpu")
    assert np.array_equal(np.float32(client.get_query_embedding(QUERY)), own.encode(QUERY, normalize_embeddings=True))


class TinyRetrieval(AbsTaskRetrieval):
    """Each query has one right document: the ``right``-th of those."""

    metadata = mteb.TaskMetadata(
        name="TinyRetrieval",
        description="A few sentences.",
        dataset={"path": "local/TinyRetrieval", "revision": "1"},
        type="Retrieval",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_1",
    )
    right: list[int]

    def load_data(self, *args, **kwargs):
        documents = [{"id": f"d{index}", "title": "", "text": text} for index, text in enumerate(TEXTS)]
        queries = [{"id": f"q{index}", "text": text} for index, text in enumerate(QUERIES)]
        split = {
            "corpus": Dataset.from_list(documents),
            "queries": Dataset.from_list(queries),
            "relevant_docs": {f"q{query}": {f"d{index}": 1} for query, index in enumerate(self.right)},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


@pytest.mark.parametrize(("right", "score"), [("argmax", 1.0), ("argmin", 0.0)])
def test_retrieval_of_mteb_takes_the_prompts_that_are_saved(own, right, score):
    similarities = own.similarity(own.encode_query(QUERIES), own.encode_document(TEXTS))
    task = TinyRetrieval()
    task.right = getattr(similarities, right)(dim=1).tolist()
    results = mteb.evaluate(own, [task], cache=None, co2_tracker=False, show_progress_bar=False)
    assert results.task_results[0].get_score() == score


@pytest.fixture(scope="module")
def url(own):
    server = Server(Embedder("my-model", own), limits=Limits(inputs=100), keys=["secret"])
    with serving(server) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="secret", max_retries=0)


def close(found, expected):
    np.testing.assert_allclose(np.float32(found), expected, rtol=0, atol=2e-6 * np.linalg.norm(expected))


def test_openai(client, own):
    for given in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="my-model", input=TEXTS, **given)
        close([row.embedding for row in answer.data], own.encode(TEXTS))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    assert client.embeddings.create(model="my-model", input=TEXTS[0], dimensions=5).data[0].index == 0
    queries = client.embeddings.create(model="my-model:query", input=TEXTS)
    close([row.embedding for row in queries.data], own.encode_query(TEXTS))
    assert [model.id for model in client.models.list()] == ["my-model", "my-model:query", "my-model:document"]


def test_openais_errors(client, url):
    with pytest.raises(openai.BadRequestError, match="'input': give a text, or a list of texts") as refused:
        client.embeddings.create(model="my-model", input=[[1, 2]])
    assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError, match='There is no model "gpt"'):
        client.embeddings.create(model="gpt", input="a")
    with pytest.raises(openai.AuthenticationError, match="has no valid API key"):
        openai.OpenAI(base_url=url, api_key="no").embeddings.create(model="my-model", input="a")


def test_langchain_of_openais(url, own):
    client = OpenAIEmbeddings(
        model="my-model", base_url=url, api_key="secret", check_embedding_ctx_length=False, chunk_size=2
    )
    close(client.embed_documents(TEXTS), own.encode(TEXTS))
    close(client.embed_query(TEXTS[0]), own.encode(TEXTS[0]))


def test_llama_index_of_openais(url, own):
    settings = {"api_base": url, "api_key": "secret"}
    client = OpenAIEmbedding(model_name="my-model:document", **settings)
    close(client.get_text_embedding_batch(TEXTS), own.encode_document(TEXTS))
    client = OpenAIEmbedding(model_name="my-model:query", **settings)
    close(client.get_query_embedding(TEXTS[0]), own.encode_query(TEXTS[0]))


SCRIPT = """
import sys
from keybert import KeyBERT
print(KeyBERT(sys.argv[1]).extract_keywords("The dog chased the cat; the cat chased the mouse.", top_n=2))
"""


def test_a_script_of_keybert(prompted_path, tmp_path):
    """Which takes a path, typed with and without ``python -m st_reba.run``."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for run, code, said in ((["-m", "st_reba.run"], 0, "[('"), ([], 1, "trust_remote_code=True")):
        command = [sys.executable, *run, str(tmp_path / "script.py"), prompted_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
