"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), written for one device: Llama with latent attention."""

from threefold.models.layers.latent_attention import LatentAttention
from threefold.models.llama.model import Block, Llama


class LatentBlock(Block):
    """One transformer layer with latent attention."""

    attention = LatentAttention


class Deepseek(Llama):
    """The whole model, of a resolved config (no field is None)."""

    block = LatentBlock
