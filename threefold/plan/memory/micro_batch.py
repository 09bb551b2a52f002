"""Peak memory of a rank in a step, by formula, and the largest micro-batch that fits.

Weights, gradients and optimizer state are those of `plan.model_size`, activations those of `plan.activations` for as
many micro-batches as the pipeline's schedule has in flight (docs/parallel/pipeline.md).
"""

from math import ceil

from threefold.config import Config, resolve
from threefold.config.resolve import default_largest
from threefold.config.rules.batch import default_micro_batches
from threefold.plan.activations import BlockSizes, block_bytes, head_bytes
from threefold.plan.memory.block_sizes import block_sizes
from threefold.plan.model_size import ModelSize

_SCATTERED = {"cpu": 1.4, "cuda": 1.0}
"""By how much activations take more than their bytes: what the C library keeps between them (`host`), as measured."""


def largest_micro_batch(config: Config, vocab_size: int, memory: int, device: str) -> int:
    """The largest micro-batch that the default may be and whose step fits into a rank's memory; the smallest where none
    does.

    Args:
        config: as loaded, and valid.
        vocab_size: tokens of the data's tokenizer.
        memory: bytes that a rank may use.
        device: `cpu` or `cuda`.
    """
    resolved = resolve(config, vocab_size)
    size = ModelSize(resolved)
    largest = default_largest(resolved, config.train.loss_chunk_size is not None, device)
    sizes = default_micro_batches(resolved)
    for micro_batch in (each for each in sizes if each <= largest):
        tried = resolve(config, vocab_size, largest_micro_batch=micro_batch)
        if step_bytes(tried, device, size) <= memory:
            return micro_batch
    return sizes[-1]


def step_bytes(config: Config, device: str, size: ModelSize | None = None) -> int:
    """The most that any rank needs for a step, buffers of communication aside.

    Args:
        config: resolved.
        device: `cpu` or `cuda`, whose attention keeps different things.
        size: of the same model in the same layout, if there is one.
    """
    size = size or ModelSize(config)
    scattered = _SCATTERED[device]
    return max(
        size.largest_rank(rank).bytes + int(scattered * activation_bytes(config, device, size, rank))
        for rank in range(config.parallel.pp)
    )


def activation_bytes(config: Config, device: str, size: ModelSize, pp_rank: int) -> int:
    """The activations that a pipeline rank keeps for its backward passes at most, and its temporary buffers.

    Args:
        config, device, size: as for `step_bytes`.
        pp_rank: its coordinate on the pp axis.
    """
    train = config.train
    layers = [name for stage in size.stages() if stage.pp_rank == pp_rank for name in stage.layers]
    blocks = [f"blocks.{number}" for number in range(config.model.num_layers)]
    replayed = size.weights.recomputed(train.recompute, train.recompute_every)
    kept = moment = 0
    for name in layers:
        block = block_sizes(config, device, int(name.partition(".")[2]) if name in blocks else 0)
        outer = block.own_tokens * block.hidden * block.itemsize
        if name in blocks:
            kept += block_bytes(block, train.recompute if name in replayed else "none")
            moment = max(moment, block_bytes(block))  # its gradients, or what is computed again
        elif name == "head":
            kept += outer + head_bytes(block, config.model.vocab_size, train.loss_chunk_size)
            moment = max(moment, 2 * _logits(config, block))
        else:
            kept += block.tokens * 8 + outer * (2 if config.model.embedding_dropout else 1)
    return ceil(kept * _under_way(config, pp_rank)) + moment


def _logits(config: Config, block: BlockSizes) -> int:
    """Bytes of the logits that the head has at once."""
    columns = -(-config.model.vocab_size // config.parallel.tp)
    return block.tokens * min(columns, config.train.loss_chunk_size or columns) * block.wide


def _under_way(config: Config, pp_rank: int) -> float:
    """Micro-batches, of all its layers, that a rank keeps at once, including those with deferred weight gradients."""
    parallel, batches = config.parallel, config.train.gradient_accumulation_steps
    if parallel.pp == 1:
        return 1
    held = parallel.pipeline_schedule.in_flight(parallel.pp, pp_rank, parallel.stage_chunks)
    return batches if held is None else min(held, batches)
