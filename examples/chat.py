"""Chat with memory: the weights that generate answers also embed earlier turns to recall them.

python examples/chat.py --model HuggingFaceTB/SmolLM2-135M-Instruct    # one line per turn; an empty line quits
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
    parser.add_argument("--recalled", type=int, default=3, help="number of turns to recall")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="maximum number of new tokens per answer")
    options = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    lm: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    memory = st_reba.build(lm, "echo-topic", tokenizer=tokenizer)  # shares the weights

    turns: list[str] = []
    for line in map(str.strip, sys.stdin):
        if not line:
            break
        recalled: list[str] = []
        if turns:
            similarities = memory.similarity(memory.encode([line]), memory.encode(turns))[0]
            nearest = similarities.topk(min(options.recalled, len(turns))).indices.tolist()
            recalled = [turns[index] for index in sorted(nearest)]
        print("(recalls: " + " / ".join(recalled) + ")")
        system = "You talk with a friend, who said before: " + " ".join(recalled)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": line}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = lm.generate(**inputs.to(lm.device), max_new_tokens=options.max_new_tokens, do_sample=False)
        print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        turns.append(line)


if __name__ == "__main__":
    main()
