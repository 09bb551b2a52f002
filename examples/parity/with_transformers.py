"""Trains a GPT-2 of two layers with `transformers.Trainer`, from samples with unequal numbers of labels."""

import argparse
import os

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from threefold_parity.transformers import ParityCallback

VOCABULARY, LENGTH, BATCH, STEPS = 96, 16, 8, 100


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(VOCABULARY, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: index % 7] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class OrderedTrainer(Trainer):
    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--accumulate", type=int, default=1)
    options.add_argument("--bf16", action="store_true")
    args = options.parse_args()
    accumulate = args.accumulate
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **without))
    arguments = TrainingArguments(
        "trained",
        use_cpu=True,
        bf16=args.bf16,
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")) // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        learning_rate=3e-3,
        max_grad_norm=0.3,
        save_strategy="no",
        report_to=[],
    )
    trainer = OrderedTrainer(model=model, args=arguments, train_dataset=Samples(), callbacks=[ParityCallback()])
    trainer.train()


if __name__ == "__main__":
    main()
