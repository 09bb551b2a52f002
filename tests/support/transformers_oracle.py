"""Models of transformers as oracles: in fp64, with weights and gradients under our names, and with given dropout masks.

Nothing here comes from the package, not even its mapping of names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Factors = Callable[[str, tuple[int, ...]], Tensor]
"""Function of a dropout layer's name and a tensor's shape; returns the factors that dropout multiplies the tensor by.
"""


class Fp64(TorchFunctionMode):
    """Make transformers compute in fp64 what it computes in fp32 for any model dtype: softmax, norms, angles.

    Args:
        attention: name → factors of the attention weights of the next layer, where they have dropout.
    """

    def __init__(self, attention: Iterable[Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self._attention = None if attention is None else iter(attention)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is F.dropout and self._attention is not None and args[0].dim() == 4:
            return next(self._attention)(args[0])
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


def random_model(transformers: Any, kind: str, settings: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a transformers model in fp64 and training mode, with all weights random, including norms and biases."""
    config = transformers.AutoConfig.for_model(kind, **settings, attn_implementation="eager")
    config._experts_implementation = "eager"
    with Fp64():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        centre = 1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2 + centre
    return model


def under_our_names(tensors: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights of a transformers model, or their gradients, as our model has them.

    Args:
        tensors: tensors by transformers' names.
        model: our settings of the model; only the numbers of heads matter.
    """
    gpt = any(name.startswith("transformer.") for name in tensors)
    return dict(_of_gpt2(tensors, model) if gpt else _of_llama(tensors, model))


def set_weights(theirs: Any, ours: Mapping[str, Tensor], model: Mapping[str, Any]) -> None:
    """Give a transformers model our weights, by numbering its elements and finding each number on our side."""
    parameters = dict(theirs.named_parameters())
    sizes = [each.numel() for each in parameters.values()]
    numbers = torch.arange(sum(sizes)).split(sizes)
    named = {name: each.view(parameters[name].shape) for name, each in zip(parameters, numbers, strict=True)}
    placed = under_our_names(named, model)
    assert placed.keys() == ours.keys()
    flat = torch.full((sum(sizes),), torch.nan, dtype=torch.float64)
    for name, place in placed.items():
        flat[place] = ours[name].double()
    for parameter, part in zip(parameters.values(), flat.split(sizes), strict=True):
        parameter.data = part.view(parameter.shape).clone()


def _of_gpt2(tensors: Mapping[str, Tensor], model: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    heads = model["num_attention_heads"]
    places = {"ln_1": "attn_norm", "ln_2": "mlp_norm", "attn.c_proj": "attn.proj", "mlp.c_fc": "mlp.up"}
    places |= {"mlp.c_proj": "mlp.down", "attn.c_attn": "attn.qkv"}
    outside = {"wte": "embed.tokens", "wpe": "embed.positions", "ln_f": "head.norm", "lm_head": "head.output"}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        if module in outside:
            yield f"{outside[module]}.{kind}", tensor
            continue
        _, layer, inner = module.split(".", 2)
        rows = tensor.T if tensor.dim() == 2 else tensor  # transformers' Conv1D holds [in, out]
        if inner == "attn.c_attn":  # all queries, all keys, all values
            q, k, v = (part.unflatten(0, (heads, -1)) for part in rows.chunk(3))
            rows = torch.stack([q, k, v], 1).flatten(0, 2)
        yield f"blocks.{layer}.{places[inner]}.{kind}", rows


def _of_llama(tensors: Mapping[str, Tensor], model: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    groups = model.get("num_key_value_heads", model["num_attention_heads"])
    outside = {"embed_tokens": "embed.tokens", "norm": "head.norm", "lm_head": "head.output"}
    places = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
        "self_attn.o_proj": "attn.proj",
        "mlp.down_proj": "mlp.down",
        "mlp.gate": "mlp.router",
        "mlp.shared_expert.down_proj": "mlp.shared.down",
        "mlp.shared_expert_gate": "mlp.shared_gate",
    }
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix("model.").rpartition(".")
        if module in outside:
            yield f"{outside[module]}.{kind}", tensor
            continue
        _, layer, inner = module.split(".", 2)
        beside = name.removesuffix(f"{inner}.{kind}")
        if inner in places:
            yield f"blocks.{layer}.{places[inner]}.{kind}", tensor
        elif inner == "self_attn.q_proj":  # a group's queries, its keys, its values
            rows = [tensors[f"{beside}self_attn.{each}_proj.{kind}"].unflatten(0, (groups, -1)) for each in "qkv"]
            yield f"blocks.{layer}.attn.qkv.{kind}", torch.cat(rows, 1).flatten(0, 1)
        elif inner.endswith("gate_proj"):  # a gate before what it gates
            rows = [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            ours = inner.replace("shared_expert", "shared").replace("gate_proj", "gate_up")
            yield f"blocks.{layer}.{ours}.{kind}", torch.stack(rows, 1).flatten(0, 1)
        elif inner == "mlp.experts" and kind == "gate_up_proj":
            yield f"blocks.{layer}.mlp.experts.gate_up", torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)
        elif inner == "mlp.experts":
            yield f"blocks.{layer}.mlp.experts.down", tensor


def logits_and_routers(
    theirs: Any, tokens: Tensor, documents: Tensor | None = None, factors: Factors | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return logits [B, S, V] of a transformers model, and router logits [B · S, experts] of each layer with a router.

    Args:
        theirs: transformers model.
        tokens: int64 [B, S].
        documents: int64 [B, S]; positions restart in each, which transformers takes for document bounds.
        factors: dropout factors.
    """
    positions = None if documents is None else positions_in(documents)
    mode = Fp64() if factors is None else Fp64(_attention_factors(theirs, factors))
    kept = {} if theirs.config.model_type == "gpt2" else {"output_router_logits": True}
    kept = kept if hasattr(theirs.config, "router_aux_loss_coef") else {}
    with mode, _residual_dropout(theirs, factors):
        out = theirs(tokens, position_ids=positions, use_cache=False, **kept)
    return out.logits, tuple(getattr(out, "router_logits", None) or ())


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, int64 [B, S]; documents must be contiguous."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return same.tril(-1).sum(2)


def _attention_factors(theirs: Any, factors: Factors) -> Iterator[Callable[[Tensor], Tensor]]:
    for layer in range(theirs.config.num_hidden_layers):
        name = f"blocks.{layer}.attn.core.dropout"
        yield lambda weights, name=name: weights * factors(name, tuple(weights.shape))  # type: ignore[misc]


@contextmanager
def _residual_dropout(theirs: Any, factors: Factors | None) -> Iterator[None]:
    """Multiply by dropout factors where transformers' GPT-2 has dropout modules; Llama gets them in the same places."""
    places: dict[str, nn.Module] = {}
    if factors is not None and theirs.config.model_type == "gpt2":
        places["embed.dropout"] = theirs.transformer.drop
        for number, layer in enumerate(theirs.transformer.h):
            places[f"blocks.{number}.dropout.attn"] = layer.attn.resid_dropout
            places[f"blocks.{number}.dropout.mlp"] = layer.mlp.dropout
    elif factors is not None:
        places["embed.dropout"] = theirs.model.embed_tokens
        for number, layer in enumerate(theirs.model.layers):
            places[f"blocks.{number}.dropout.attn"] = layer.self_attn.o_proj
            places[f"blocks.{number}.dropout.mlp"] = layer.mlp

    def hook(name: str) -> Callable[[Any, Any, Tensor], Tensor]:
        assert factors is not None
        return lambda _module, _given, out: out * factors(name, tuple(out.shape))

    handles = [module.register_forward_hook(hook(name)) for name, module in places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
