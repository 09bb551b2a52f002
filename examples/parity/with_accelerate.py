"""Trains the GPT of train.py with Accelerate: DistributedDataParallel and gradient accumulation."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from train import BATCH, GPT, LENGTH, VOCABULARY

import threefold_parity as parity
from threefold_parity.accelerate import AccelerateAdapter


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--accumulate", type=int, default=1)
    options.add_argument("--bf16", action="store_true")
    args = options.parse_args()
    accumulate, precision = args.accumulate, "bf16" if args.bf16 else "no"
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder = parity.Recorder(model, optimizer, AccelerateAdapter())
    data = torch.Generator().manual_seed(1)
    for _ in range(100):
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
        mine = batch.chunk(accelerator.num_processes)[accelerator.process_index]
        for part in mine.chunk(accumulate):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    recorder.close()


if __name__ == "__main__":
    main()
