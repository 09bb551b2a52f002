"""Default micro-batch size: the largest whose step fits into a rank's memory."""

from math import ceil

from threefold.config import Config, resolve
from threefold.config.resolve import default_largest
from threefold.config.rules import default_micro_batches
from threefold.planner.activations import block_bytes, head_bytes
from threefold.planner.block import own_attention, rank_block
from threefold.planner.model_size import ModelSize

_SCATTERED = {"cpu": 1.4, "cuda": 1.0}
"""Factor of activation memory over its bytes, as measured: the C library (`host`) keeps memory between tensors."""


def largest_micro_batch(config: Config, vocab_size: int, memory: int, device: str) -> int:
    """Return the largest default micro-batch whose step fits into a rank's memory, or the smallest if none does.

    Args:
        config: loaded and valid config.
        vocab_size: vocabulary size of the data's tokenizer.
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
    """Return the most bytes that any rank needs for a step, without communication buffers.

    Args:
        config: resolved config of the run.
        device: `cpu` or `cuda`, whose attention keeps different tensors.
        size: size of the same model in the same layout, if known.
    """
    size = size or ModelSize(config)
    scattered = _SCATTERED[device]
    return max(
        size.largest_rank(rank).bytes + int(scattered * activation_bytes(config, device, size, rank))
        for rank in range(config.parallel.pp)
    )


def activation_bytes(config: Config, device: str, size: ModelSize, pp_rank: int) -> int:
    """Return the peak bytes of a pipeline rank's kept activations and temporary buffers.

    Args:
        config, device, size: see `step_bytes`.
        pp_rank: coordinate of the rank on the pp axis.
    """
    model, train, weights = config.model, config.train, size.weights
    replayed = weights.recomputed(train.recompute, train.recompute_every)
    layers, of_layer = weights.plan.layers, {}
    for name, described in zip(layers[1:-1], weights.blocks, strict=True):
        of_layer[name] = rank_block(config, described, attention=own_attention(config, described, device))
    first = of_layer[layers[1]]
    kept = moment = 0
    for name in size.layers_of_rank(pp_rank):
        block = of_layer.get(name, first)
        if name in of_layer:
            kept += block_bytes(block, train.recompute if name in replayed else "none")
            moment = max(moment, block_bytes(block))  # its gradients, or its recomputed activations
        elif name == layers[-1]:
            kept += block.outer + head_bytes(block, model.vocab_size, train.loss_chunk_size)
            columns = -(-model.vocab_size // config.parallel.tp)
            logits = block.tokens * min(columns, train.loss_chunk_size or columns) * block.wide  # held at once
            moment = max(moment, 2 * logits)
        else:
            kept += block.tokens * 8 + block.outer * (2 if model.embedding_dropout else 1)
    return ceil(kept * _under_way(config, pp_rank)) + moment


def _under_way(config: Config, pp_rank: int) -> float:
    """Return the micro-batches that a rank keeps at once, including those with deferred weight gradients."""
    parallel, batches = config.parallel, config.train.gradient_accumulation_steps
    if parallel.pp == 1:
        return 1
    held = parallel.pipeline_schedule.in_flight(parallel.pp, pp_rank, parallel.stage_chunks)
    return batches if held is None else min(held, batches)
