"""Train the demo LM on the output of prepare.py for a given time.

    OMP_WAIT_POLICY=PASSIVE python train.py --data DIR --out DIR --seconds N [--seed N]

--out becomes a model directory: bfloat16 weights, configuration and tokenizer. The learning rate follows the share of
--seconds that has passed, so the number of steps, and with it the result, depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, BATCH, VOCAB = 256, 24, 8192
PEAK_LR, WARMUP_STEPS = 2.5e-3, 200
DECAY_FROM, LOWEST = 0.6, 0.05  # share of the time, share of the peak rate
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).train()


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """AdamW with weight decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, spent: float) -> float:
    """Warm-up by steps, then constant, then linear decay by the share of the time that is ``spent``."""
    decay = 1 if spent < DECAY_FROM else max(LOWEST, 1 - (spent - DECAY_FROM) / (1 - DECAY_FROM))
    return PEAK_LR * min(1, (step + 1) / WARMUP_STEPS) * decay


def batch_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss on random windows of the stream."""
    starts = torch.randint(0, len(tokens) - LENGTH - 1, (BATCH,))
    x = torch.stack([tokens[i : i + LENGTH + 1] for i in starts])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=x[:, :-1], use_cache=False).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    return torch.nn.functional.cross_entropy(logits.float().view(-1, VOCAB), x[:, 1:].reshape(-1))


def train(model: LlamaForCausalLM, tokens: torch.Tensor, seconds: float) -> None:
    optimizer = build_optimizer(model)
    start, step, smooth = time.time(), 0, None
    while (spent := (time.time() - start) / seconds) < 1:
        rate = learning_rate(step, spent)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = batch_loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        if step % 20 == 0:
            speed = step * BATCH * LENGTH / (time.time() - start)
            print(f"step {step}  loss {smooth:.3f}  {speed:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo LM on the output of prepare.py.")
    parser.add_argument("--data", type=Path, required=True, help="output directory of prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--seconds", type=float, required=True, help="training time (the demo LM: 80 minutes)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.seconds > 0:
        parser.error("--seconds must be positive")
    missing = [name for name in ("train.npy", *TOKENIZER_FILES) if not (args.data / name).is_file()]
    if missing:
        parser.error(f"no {', '.join(missing)} in {args.data}; run prepare.py --out {args.data} first")

    torch.manual_seed(args.seed)
    tokens = torch.from_numpy(np.load(args.data / "train.npy").astype(np.int64))
    if len(tokens) < LENGTH + 2:
        parser.error(f"train.npy has only {len(tokens)} tokens; at least {LENGTH + 2} are needed")
    model = build_model()
    train(model, tokens, args.seconds)

    model.to(torch.bfloat16).save_pretrained(args.out)
    for name in TOKENIZER_FILES:
        if args.data.resolve() != args.out.resolve():
            shutil.copyfile(args.data / name, args.out / name)


if __name__ == "__main__":
    main()
