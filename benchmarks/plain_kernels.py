"""Kernels of a `PlainGPT` step called one after another: no autograd, no modules, no look-ups.

Measures a step in which everything but torch's kernels is free: a lower bound for any training that calls these
kernels.
"""

import torch
from plain_gpt import PlainGPT
from torch import Tensor, nn

_KERNELS = torch.ops.aten
_EPS = 1e-5

Gradients = dict[str, Tensor]


class PlainKernels:
    """Forward and backward pass of a `PlainGPT` in fp32, by hand.

    Args:
        model: model whose weights it uses.
    """

    def __init__(self, model: PlainGPT) -> None:
        self.heads = model.blocks[0].heads
        self.layers = len(model.blocks)
        self.weights = {name: each.detach() for name, each in model.named_parameters()}
        self._kept: list[tuple[Tensor, ...]] = []

    def loss_and_gradients(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Gradients]:
        """Return the mean loss of int64 `tokens` [B, S] and `labels` [B, S], and the gradient of each weight."""
        weights, (batch, length) = self.weights, tokens.shape
        table = weights["tokens.weight"]
        vocab, hidden = table.shape
        x = nn.functional.embedding(tokens, table) + weights["positions.weight"][:length]
        x = x.view(batch * length, hidden)
        for number in range(self.layers):
            x = self._block(f"blocks.{number}.", x, batch)
        normed, mean, scale = self._norm("norm.", x)
        log_p = _KERNELS._log_softmax(normed @ table.t(), 1, False)
        loss, total = _KERNELS.nll_loss_forward(log_p, labels.flatten(), None, 1, -100)

        found: Gradients = {}
        upper = _KERNELS.nll_loss_backward(torch.ones(()), log_p, labels.flatten(), None, 1, -100, total)
        upper = _KERNELS._log_softmax_backward_data(upper, log_p, 1, log_p.dtype)
        of_head = upper.t() @ normed
        upper = self._norm_backward("norm.", upper @ table, x, mean, scale, found)
        for number in reversed(range(self.layers)):
            upper = self._block_backward(f"blocks.{number}.", upper, batch, found)
        upper = upper.view(batch, length, hidden)
        found["tokens.weight"] = of_head + _KERNELS.embedding_dense_backward(upper, tokens, vocab, -1, False)
        found["positions.weight"] = upper.sum(0)
        return loss, found

    def _block(self, name: str, x: Tensor, batch: int) -> Tensor:
        normed1, mean1, scale1 = self._norm(f"{name}norm1.", x)
        qkv = self._linear(f"{name}qkv.", normed1).view(batch, -1, 3, self.heads, x.shape[1] // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        out, sums = _KERNELS._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        attended = out.transpose(1, 2).reshape(x.shape)
        between = x + self._linear(f"{name}proj.", attended)
        normed2, mean2, scale2 = self._norm(f"{name}norm2.", between)
        inner = self._linear(f"{name}up.", normed2)
        active = _KERNELS.gelu(inner, approximate="tanh")
        first = (x, normed1, mean1, scale1, query, key, value, out, sums, attended)
        self._kept.append((*first, between, normed2, mean2, scale2, inner, active))
        return between + self._linear(f"{name}down.", active)

    def _block_backward(self, name: str, upper: Tensor, batch: int, found: Gradients) -> Tensor:
        x, normed1, mean1, scale1, query, key, value, out, sums, attended, *second = self._kept.pop()
        between, normed2, mean2, scale2, inner, active = second
        below = self._linear_backward(f"{name}down.", upper, active, found)
        below = _KERNELS.gelu_backward(below, inner, approximate="tanh")
        below = self._linear_backward(f"{name}up.", below, normed2, found)
        upper = upper + self._norm_backward(f"{name}norm2.", below, between, mean2, scale2, found)
        below = self._linear_backward(f"{name}proj.", upper, attended, found)
        below = below.view(batch, -1, self.heads, x.shape[1] // self.heads).transpose(1, 2)
        parts = _KERNELS._scaled_dot_product_flash_attention_for_cpu_backward(
            below, query, key, value, out, sums, 0.0, True
        )
        of_qkv = torch.stack([part.transpose(1, 2) for part in parts], 2).view(len(x), -1)
        below = self._linear_backward(f"{name}qkv.", of_qkv, normed1, found)
        return upper + self._norm_backward(f"{name}norm1.", below, x, mean1, scale1, found)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.addmm(self.weights[f"{name}bias"], x, self.weights[f"{name}weight"].t())

    def _linear_backward(self, name: str, upper: Tensor, x: Tensor, found: Gradients) -> Tensor:
        found[f"{name}weight"], found[f"{name}bias"] = upper.t() @ x, upper.sum(0)
        return upper @ self.weights[f"{name}weight"]

    def _norm(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = self.weights[f"{name}weight"], self.weights[f"{name}bias"]
        found: tuple[Tensor, Tensor, Tensor] = _KERNELS.native_layer_norm(x, [x.shape[1]], weight, bias, _EPS)
        return found

    def _norm_backward(
        self, name: str, upper: Tensor, x: Tensor, mean: Tensor, scale: Tensor, found: Gradients
    ) -> Tensor:
        weight, bias = self.weights[f"{name}weight"], self.weights[f"{name}bias"]
        below, found[f"{name}weight"], found[f"{name}bias"] = _KERNELS.native_layer_norm_backward(
            upper, x, [x.shape[1]], mean, scale, weight, bias, [True, True, True]
        )
        return below
