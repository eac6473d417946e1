"""A chat that remembers: embeddings from the weights that talk find what was said before.

python examples/chat.py --model HuggingFaceTB/SmolLM2-135M-Instruct    # one line is one turn; an empty line ends
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import st_reba


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--recalled", type=int, default=3, help="turns that are recalled")
    parser.add_argument("--words", type=int, default=60, help="new tokens of an answer, at most")
    given = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    lm: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    memory = st_reba.build(lm, "echo-topic", tokenizer=tokenizer)  # no second copy of the weights

    said: list[str] = []
    for line in map(str.strip, sys.stdin):
        if not line:
            break
        recalled: list[str] = []
        if said:
            alike = memory.similarity(memory.encode([line]), memory.encode(said))[0]
            nearest = alike.topk(min(given.recalled, len(said))).indices.tolist()
            recalled = [said[number] for number in sorted(nearest)]
        print("(recalls: " + " / ".join(recalled) + ")")
        system = "You talk with a friend, who told you before: " + " ".join(recalled)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": line}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = lm.generate(**inputs.to(lm.device), max_new_tokens=given.words, do_sample=False)
        print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        said.append(line)


if __name__ == "__main__":
    main()
