"""From raw text to a model directory: a smoke run of the demo LM's scripts on a few made-up documents."""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts" / "demo_lm"
sys.path.insert(0, str(SCRIPTS))

import held_out  # noqa: E402
import make  # noqa: E402
import muon  # noqa: E402
import overlap  # noqa: E402
import prepare  # noqa: E402
import train  # noqa: E402

ENGLISH = ("the", "a", "fox", "river", "old", "house", "who", "sees", "walks", "never", "on", "in", "under", "green")
CHINESE = "我们在系统中安装软件包的时候需要先检查内核版本和网络配置是否正确"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the shape that the real ones have."""
    directory = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)

    def english(words: int) -> str:
        return " ".join(rng.choices(ENGLISH, k=words))

    def chinese(characters: int) -> str:
        return "".join(rng.choices(CHINESE, k=characters))

    texts = {
        "zh_lctt.txt.xz": "\n\n".join(chinese(80) for _ in range(150)),
        "zh_cmrc2018_ctx.txt.xz": "\n".join(chinese(60) for _ in range(150)),
        "tatoeba_zh_en.tsv.xz": "\n".join(f"{chinese(8)}\t{english(6)}" for _ in range(1500)),
        "tinystories_4MB_lower.txt.xz": "\n\n".join(english(30) for _ in range(150)),
        "en_novels_sample.txt.xz": "\n\n".join(english(40) for _ in range(300)),
    }
    for name, text in texts.items():
        with lzma.open(directory / name, "wt", encoding="utf-8") as file:
            file.write(text)
    return directory


@pytest.fixture(scope="module")
def made(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the one command writes."""
    out = tmp_path_factory.mktemp("made") / "lm"
    asked = ["--tokens", "8192", "--size", "tiny", "--vocabulary", "400"]
    make.main(["--corpus", str(corpus), "--out", str(out), *asked])
    return out


@pytest.fixture(scope="module")
def stream(made: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(made.with_name("lm.data") / "train.npy").astype(np.int64))


def test_one_command_makes_a_model_that_transformers_loads(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer("the old fox 软件包")["input_ids"]) == "the old fox 软件包"


def test_the_card_has_the_figures_of_this_model(made: Path) -> None:
    card = (made / "README.md").read_text(encoding="utf-8")
    assert "$" not in card
    assert "2 steps of 16 x 256 tokens" in card
    scores = held_out.held_out_scores(made, made.with_name("lm.data") / "held_out.json")
    for language in ("zh", "en"):
        assert f"| {language} | {scores[language].characters:,} | {scores[language].per_character:.3f} |" in card


def test_held_out_documents_are_in_neither_stream_nor_tokenizer_text(corpus: Path) -> None:
    found = prepare.read_corpus(corpus)
    aside = [text for texts in found.held_out.values() for text in texts]
    kept = {text for texts in found.training.values() for text in texts}
    assert 0 < len(aside) < 0.05 * len(kept)
    assert not kept & set(aside)


def test_some_short_documents_stand_twice() -> None:
    texts = [f"document {number}" for number in range(2000)]
    twice = [text for text in texts if prepare.repeated(text) == f"{text}\n{text}"]
    assert all(prepare.repeated(text) == text for text in set(texts) - set(twice))
    assert 0.03 < len(twice) / len(texts) < 0.07
    assert prepare.repeated(long := "x" * 401) == long


def test_a_stopped_run_ends_with_the_same_weights(
    stream: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = train.Settings(tokens=5 * 512, size="tiny", batch=4, length=128)
    monkeypatch.setattr(train, "SAVE_EVERY_S", 0.0)
    whole, progress = train.train(settings, stream, 400, tmp_path / "whole.pt")
    assert progress.step == settings.steps == 5

    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(settings, stream, 400, tmp_path / "stopped.pt", on_step=stop)
    again, progress = train.train(settings, stream, 400, tmp_path / "stopped.pt")
    assert progress.step == 5
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, again.state_dict()[name]), name


def test_another_run_s_checkpoint_is_refused(stream: torch.Tensor, tmp_path: Path) -> None:
    settings = train.Settings(tokens=512, size="tiny", batch=4, length=128)
    train.train(settings, stream, 400, tmp_path / "run.pt")
    other = train.Settings(tokens=512, size="tiny", batch=4, length=128, seed=1)
    with pytest.raises(ValueError, match="is of a run with seed = 0, but now it is 1"):
        train.train(other, stream, 400, tmp_path / "run.pt")


def test_a_loss_that_is_not_finite_stops_the_run_before_a_checkpoint(
    stream: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "cross_entropy", lambda logits, targets, reduction: logits.sum() * float("nan"))
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        train.train(train.Settings(tokens=512, size="tiny", batch=4, length=128), stream, 400, tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()


def test_training_lowers_the_loss(stream: torch.Tensor, tmp_path: Path) -> None:
    settings = train.Settings(tokens=40 * 512, size="tiny", batch=4, length=128)
    model, _ = train.train(settings, stream, 400, tmp_path / "run.pt")
    batch = train.windows(stream, settings, 0)
    with torch.no_grad():
        before = train.batch_loss(train.build_model(settings, 400), batch, "float32")
        after = train.batch_loss(model, batch, "float32")
    assert after < before - batch[:, 1:].numel()


def test_workers_share_a_batch(stream: torch.Tensor) -> None:
    gradients = []
    for count in (1, 2, 4):
        settings = train.Settings(tokens=512, size="tiny", batch=4, length=128, workers=count)
        model = train.build_model(settings, 400)
        batch = train.windows(stream, settings, 0)
        loss = train.Workers(settings).gradient(model, batch)
        assert loss * batch[:, 1:].numel() == pytest.approx(train.batch_loss(model, batch, "float32").item(), rel=1e-5)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in gradients[1:]:
        for one, grad in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(one, grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("count", [0, -1, 3])
def test_workers_that_cannot_share_a_batch_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} workers cannot share a batch of 16: give a divisor of it"):
        train.Workers(train.Settings(tokens=512, workers=count))


def test_a_run_goes_on_from_trained_weights(made: Path, stream: torch.Tensor, tmp_path: Path) -> None:
    still = train.Settings(tokens=512, batch=4, length=128, rate=0.0, start=train.digest(made))
    model, _ = train.train(still, stream, 400, tmp_path / "still.pt", start=made)
    for name, weights in AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).state_dict().items():
        assert torch.equal(weights, model.state_dict()[name]), name


def test_a_start_keeps_its_tokenizer_and_size(corpus: Path, made: Path, tmp_path: Path) -> None:
    prepare.prepare(corpus, tmp_path / "data", start=made)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    options = argparse.Namespace(tokens=1, start=made, size="8M")
    with pytest.raises(ValueError, match="--size is that of the model that --start names"):
        train.run(options, tmp_path / "data", tmp_path / "out")
    tokenizer = tmp_path / "data" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace("<|endoftext|>", "<|end|>"), encoding="utf-8")
    with pytest.raises(ValueError, match="was made with another tokenizer than that of"):
        train.run(argparse.Namespace(tokens=1, start=made, size=None), tmp_path / "data", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        prepare.prepare(corpus, tmp_path / "other", start=tmp_path)
    with pytest.raises(ValueError, match="has no safetensors"):
        train.digest(tmp_path)


def test_the_record_names_the_size_of_the_start(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    assert train.size_of(made) == "tiny"
    assert train.size_of(other) == "other"
    options = argparse.Namespace(
        tokens=1, size=None, start=made, device="cpu", precision="float32", workers=1, rate=0.0, seed=0
    )
    settings, _ = train.run(options, made.with_name("lm.data"), tmp_path / "out")
    assert settings.size == "tiny"
    assert json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))["size"] == "tiny"


def test_an_epoch_reads_every_window_once(stream: torch.Tensor) -> None:
    settings = train.Settings(tokens=1, batch=1, length=256)
    count = (len(stream) - 1) // 256 - 1
    numbered = torch.arange(len(stream))
    starts = [int(train.windows(numbered, settings, step)[0, 0]) for step in range(count)]
    assert sorted(starts) == list(range(min(starts), min(starts) + count * 256, 256))
    following = [int(train.windows(numbered, settings, step)[0, 0]) for step in range(count, 2 * count)]
    assert following != starts


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 24), (2, 24, 8)])
def test_muon_turns_singular_values_into_ones(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inside = left.mT @ muon.orthogonalised(matrices) @ right.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert bool(((values > 0.6) & (values < 1.3)).all())
    assert torch.allclose(inside, torch.diag_embed(values), atol=1e-3)


def test_bits_per_character_are_those_of_the_model_s_own_loss(made: Path) -> None:
    model, tokenizer = held_out.load(made)
    text = "the old fox never sees the river"
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    nats = float(model(input_ids=ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
    alone = held_out.score(model, tokenizer, [text])
    assert alone.per_character == pytest.approx(nats / held_out.LN2 / len(text), rel=1e-4)
    both = held_out.score(model, tokenizer, ["我们", text])
    assert both.bits - held_out.score(model, tokenizer, ["我们"]).bits == pytest.approx(alone.bits, rel=1e-4)


def test_overlap_is_a_run_of_thirteen_words_or_a_whole_shorter_text() -> None:
    run = "one two three four five six seven eight nine ten eleven twelve thirteen"
    training = [f"before {run.upper()}, behind", "我们在系统中安装软件"]
    texts = [f"{run} fourteen", run.replace("seven", "7"), "在系统中安装", "在系统中装", "too short"]
    found = overlap.overlapping({"whole": texts, "half": texts[1:3], "none": texts[3:]}, training)
    assert found == {"whole": {texts[0], texts[2]}, "half": {texts[2]}, "none": set()}
    assert overlap.comparable(texts) == set(texts[:4])


def test_missing_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make.main(["--corpus", str(tmp_path), "--out", str(tmp_path / "out"), "--tokens", "1"])
    assert "has no zh_lctt.txt.xz, zh_cmrc2018_ctx.txt.xz" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_held_out_text_is_written_with_its_language(made: Path) -> None:
    found = json.loads((made.with_name("lm.data") / "held_out.json").read_text(encoding="utf-8"))
    assert [entry["language"] for entry in found.values()] == ["zh", "zh", "zh-en", "en", "en"]
