"""Layers of torch whose result depends on which samples a rank has, or on what was drawn before: refused by name."""

from collections.abc import Mapping

from torch import nn

from threefold.errors import UserError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WITH_DROPOUT = (nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU)
_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)
_SPECTRAL_NORM = "_SpectralNorm"
"""The class of the parametrization `torch.nn.utils.parametrizations.spectral_norm`."""


def refuse_layout_dependent(modules: Mapping[str, nn.Module]) -> None:
    """Check that no module of a model is one of torch's that computes something else in another layout.

    Args:
        modules: of the whole, single-device model by name.

    Raises:
        UserError: one is; says what to write in its place.
    """
    for name, module in modules.items():
        kind = type(module).__name__
        if isinstance(module, _BATCH_NORMS):
            raise UserError(
                f"{name!r} is a {kind}, whose statistics are those of the samples of its own rank and micro-batch, so "
                "that the layout would change the result; use a LayerNorm or GroupNorm."
            )
        if isinstance(module, _DROPOUTS) and module.p > 0:
            raise UserError(
                f"{name!r} is {kind}(p={module.p:g}), which draws from torch's generator, so that the layout "
                f"would change what is dropped; use threefold.Dropout({module.p:g}, {name!r}), called with the "
                "activation and samples.keys, samples being a parameter of the layer's forward."
            )
        if isinstance(module, _WITH_DROPOUT) and module.dropout > 0:
            raise UserError(
                f"{name!r} is {kind}(dropout={module.dropout:g}), which draws from torch's generator, so that "
                "the layout would change what is dropped; use dropout=0, with a threefold.Dropout after it."
            )
        if isinstance(module, _DRAWING):
            raise UserError(
                f"{name!r} is {kind}(), which draws from torch's generator, so that the layout would change the "
                "result; use a layer that draws nothing."
            )
        if isinstance(module, _LOOK_UPS):
            _check_look_up(name, module)
        if type(module).__name__ == _SPECTRAL_NORM or _has_spectral_norm_hook(module):
            owner = name.partition(".parametrizations.")[0]
            raise UserError(
                f"{owner!r} has spectral_norm, which estimates the norm anew in each forward pass, so that the number "
                "of micro-batches and the layout would change the result; use weight_norm, or none."
            )


def _check_look_up(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    kind = type(module).__name__
    if module.max_norm is not None:
        raise UserError(
            f"{name!r} is {kind}(max_norm={module.max_norm:g}), which changes the rows that a rank looks up in "
            "its forward pass, so that the replicas' weights would part; use max_norm=None and normalize what it "
            "returns."
        )
    if module.scale_grad_by_freq:
        raise UserError(
            f"{name!r} is {kind}(scale_grad_by_freq=True), which counts the samples of its own rank and micro-batch, "
            "so that the layout would change the gradient; use scale_grad_by_freq=False."
        )


def _has_spectral_norm_hook(module: nn.Module) -> bool:
    """Whether `torch.nn.utils.spectral_norm` was applied, which leaves `weight_orig`, `weight_u` and `weight_v`."""
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    stems = [name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False) if name.endswith("_orig")]
    return any({f"{stem}_u", f"{stem}_v"} <= buffers for stem in stems)
