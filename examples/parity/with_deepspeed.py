"""Trains the GPT of train.py with DeepSpeed, ZeRO 0 to 3."""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from train import BATCH, GPT, LENGTH, VOCABULARY

import threefold_parity as parity
from threefold_parity.deepspeed import DeepSpeedAdapter

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--zero", type=int, default=0)
    options.add_argument("--accumulate", type=int, default=1)
    options.add_argument("--bf16", action="store_true")
    args = options.parse_args()
    os.environ |= {name: value for name, value in ALONE.items() if name not in os.environ}
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = GPT()
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": args.zero, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": args.bf16},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    recorder = parity.Recorder(engine, adapter=DeepSpeedAdapter(), axes={"dp": dist.get_world_size()})
    data = torch.Generator().manual_seed(1)
    for _ in range(100):
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
        for part in batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(args.accumulate):
            loss = F.cross_entropy(engine(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
    recorder.close()


if __name__ == "__main__":
    main()
