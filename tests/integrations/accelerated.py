"""The loop of two_processes.py under Accelerate; the first process writes the trained weights to a file.

usage: torchrun --standalone --nproc-per-node 2 accelerated.py FILE
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn, optim
from two_processes import batches, gpt2, leave, weights

from fasterqk import make_optimizer


def main():
    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    model = accelerator.prepare(gpt2())
    optimizer = accelerator.prepare(
        make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10, weight_decay=0.1)
    )
    for ids, labels in batches():
        mine = slice(rank, None, processes)
        logits = model(input_ids=ids[mine]).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[mine, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        accelerator.backward(loss * processes / (labels[:, 1:] != -100).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        torch.save({"processes": processes, **weights(accelerator.unwrap_model(model))}, sys.argv[1])
    leave()


if __name__ == "__main__":
    main()
