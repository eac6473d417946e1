"""A plain directory under the backends of sentence-transformers: vectors and times beside torch.

    python -m venv engines && engines/bin/pip install "sentence-transformers[onnx,openvino]"
    engines/bin/python benchmarks/engines.py --plain DIR --vectors FILE.npy --name "Echo-2, last"

Adds rows to ``benchmarks/results/engines.csv``. Runs in an environment of its own without st_reba: optimum-onnx asks
for an older transformers. ``--plain`` is what ``st-reba export --plain`` wrote; ``--vectors`` are those of the model
that was exported, of :data:`TEXTS`, in float32.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

RESULTS = Path(__file__).resolve().parent / "results" / "engines.csv"
TEXTS = [
    f"The {animal} {verb} near the {place}." for animal in ("dog", "old cat") for verb in ("slept", "was seen")
    for place in ("river", "station", "house of a friend", "sea")
]  # fmt: skip
#: By the length's name, texts that are timed.
TIMED = {"short": TEXTS, "long": [" ".join([text] * 30) for text in TEXTS[:4]]}
ROUNDS = 5
Backend = Literal["onnx", "openvino"]
BACKENDS: tuple[Backend, ...] = ("onnx", "openvino")


def without_positions(directory: Path) -> None:
    """Count positions from the attention mask inside an exported graph.

    optimum exports a decoder with the input ``position_ids``, and sentence-transformers gives none: ONNX Runtime then
    refuses, and OpenVINO gives NaN. Padding is on the right, so that the running sum of the mask, less 1, is
    the position.
    """
    for file in directory.rglob("*.onnx"):
        import onnx

        model = onnx.load(str(file))
        graph = model.graph
        graph.initializer.append(onnx.helper.make_tensor("one", onnx.TensorProto.INT64, [], [1]))
        graph.node.insert(0, onnx.helper.make_node("Sub", ["counted", "one"], ["position_ids"]))
        graph.node.insert(0, onnx.helper.make_node("CumSum", ["attention_mask", "one"], ["counted"]))
        graph.input.remove(next(each for each in graph.input if each.name == "position_ids"))
        onnx.save(model, str(file))
    for file in directory.rglob("*.xml"):
        import openvino
        from openvino import opset13

        model = openvino.Core().read_model(str(file))
        mask, given = (model.input(name).get_node() for name in ("attention_mask", "position_ids"))
        counted = opset13.cum_sum(mask.output(0), opset13.constant(1))
        positions = opset13.subtract(counted, opset13.constant(np.int64(1)))
        for target in list(given.output(0).get_target_inputs()):
            target.replace_source_output(positions.output(0))
        model.remove_parameter(given)
        new = file.with_name("new.xml")
        openvino.save_model(model, str(new), compress_to_fp16=False)
        del model
        new.with_suffix(".bin").replace(file.with_suffix(".bin"))
        new.replace(file)


def loaded(plain: Path, backend: Backend, scratch: Path) -> SentenceTransformer:
    """The plain directory under a backend, exported, with the graph mended."""
    own = scratch / backend
    SentenceTransformer(str(plain), backend=backend, device="cpu").save_pretrained(str(own))
    without_positions(own)
    options: dict[str, Any] = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}} if backend == "openvino" else {}
    if backend == "onnx":
        import onnxruntime

        options["session_options"] = onnxruntime.SessionOptions()
        options["session_options"].intra_op_num_threads = 1
    return SentenceTransformer(str(own), backend=backend, device="cpu", model_kwargs=options)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--plain", type=Path, required=True, help="directory that st-reba export --plain wrote")
    made.add_argument("--vectors", type=Path, required=True, help="of the exported model, in float32")
    made.add_argument("--name", required=True, help="of the recipe, in tables")
    made.add_argument("--model", default="SmolLM2-135M-Instruct", help="in tables")
    given = made.parse_args()
    torch.set_num_threads(1)
    expected = np.load(given.vectors)

    def seconds(model: SentenceTransformer, texts: Sequence[str]) -> float:
        start = time.process_time()
        model.encode(list(texts), show_progress_bar=False)
        return time.process_time() - start

    with tempfile.TemporaryDirectory() as scratch:
        models = {
            f"torch, {name}": SentenceTransformer(str(given.plain), device="cpu", model_kwargs={"dtype": name})
            for name in ("float32", "bfloat16")
        }
        models |= {backend: loaded(given.plain, backend, Path(scratch)) for backend in BACKENDS}
        row = {"model": given.model, "recipe": given.name, "date": time.strftime("%Y-%m-%d")}
        packages = ("torch", "transformers", "sentence-transformers", "onnxruntime", "openvino")
        row["versions"] = ", ".join(f"{name} {version(name)}" for name in packages)
        found: dict[tuple[str, str], list[float]] = {}
        for length, texts in TIMED.items():
            for turn in range(1 + ROUNDS):
                for name, model in models.items():
                    took = seconds(model, texts)
                    if turn:
                        found.setdefault((name, length), []).append(took)
        with RESULTS.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for name, model in models.items():
                vectors = model.encode(TEXTS).astype(float)
                products = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1)
                lowest = float((products / np.linalg.norm(expected, axis=1)).min())
                speeds = [round(len(texts) / median(found[name, length]), 2) for length, texts in TIMED.items()]
                for quantity, value in zip(("lowest cosine", "short", "long"), (lowest, *speeds), strict=True):
                    made_row = [row["model"], row["recipe"], name, quantity, value, row["date"], row["versions"]]
                    writer.writerow(made_row)
                    print(made_row, flush=True)


if __name__ == "__main__":
    main()
