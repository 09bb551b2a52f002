"""The memory of the layers of a layout, one by one."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from threefold.config import Config
from threefold.plan.activations import BlockSizes
from threefold.plan.memory.block_sizes import block_sizes
from threefold.plan.memory.layers import LayerBytes, block_layer, embedding_layer, head_layer
from threefold.plan.memory.systems import Keeps


class LayerMemory:
    """What layers need on a rank for one micro-batch.

    Args:
        config: resolved.
        device: `cpu` or `cuda`.
        keeps: of the training system.
        layers: names of the model's, in order.
        replayed: of them, those that are computed again.
    """

    def __init__(
        self, config: Config, device: str, keeps: Keeps, layers: Sequence[str], replayed: Collection[str]
    ) -> None:
        self._config, self._device, self._keeps = config, device, keeps
        self._layers, self._replayed = layers, replayed
        self._blocks: dict[object, tuple[BlockSizes, LayerBytes]] = {}

    @property
    def output(self) -> int:
        """Bytes of the output of a block."""
        block, _ = self._block(0)
        return block.own_tokens * block.hidden * block.itemsize

    @property
    def narrow_logits(self) -> int:
        """Bytes of logits that are cast to fp32 for the loss; 0 where none are."""
        block, chunk = self._block(0)[0], self._config.train.loss_chunk_size if self._keeps.chunked_loss else 0
        if chunk or not self._keeps.casts_logits or block.itemsize == block.wide:
            return 0
        columns = self._config.model.vocab_size // (1 if self._keeps.whole_logits else block.tp)
        return block.tokens * columns * block.itemsize

    def of(self, name: str) -> LayerBytes:
        """Those of a layer."""
        config, layers = self._config, self._layers
        if name not in (layers[0], layers[-1]):
            return self._block(int(name.rpartition(".")[2]))[1]
        model, (block, _) = config.model, self._block(0)
        if name == layers[-1]:
            chunk = config.train.loss_chunk_size if self._keeps.chunked_loss else 0
            if self._keeps.whole_logits:
                block = replace(block, tp=1, sequence_parallel=False)
            return head_layer(block, model.vocab_size, chunk)
        learned = model.position_embedding == "learned"
        positions = model.max_position_embeddings if learned else 0
        dropout = model.embedding_dropout if model.architecture == "gpt" else model.hidden_dropout
        return embedding_layer(block, model.vocab_size, positions, dropout > 0, self._device)

    def _block(self, layer: int) -> tuple[BlockSizes, LayerBytes]:
        model = self._config.model
        replayed = f"blocks.{layer}" in self._replayed
        key = model.has_experts(layer), model.window(layer), replayed
        if key not in self._blocks:
            sizes = block_sizes(self._config, self._device, layer)
            experts = None if sizes.experts is None else replace(sizes.experts, even=True)
            attention = self._keeps.attention(sizes.attention)
            sizes = replace(sizes, kernels=self._keeps.kernels, attention=attention, experts=experts)
            self._blocks[key] = sizes, block_layer(sizes, self._config.train.recompute if replayed else "none")
        return self._blocks[key]
