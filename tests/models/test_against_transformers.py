"""Loss and gradient of every parameter of each family against transformers in fp64, also with dropout masks by hand.

Layouts are compared with one process, which runs the same model: a mistake in the model itself they would share.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.masks_by_hand import dropout_factors
from tests.support.double import Fp64
from tests.support.parity import Case, make_engine, shard_of, whole_tensors
from tests.support.sweep import sweep
from threefold.config import Config, resolve
from threefold.constants import IGNORE_INDEX
from threefold.models.family import make_model
from threefold.models.layers.decoder import Decoder, SampleInfo
from threefold.random.dropout import Dropout, sample_keys
from threefold.verify.worker_pool import WorkerPool

Factors = Callable[[str, tuple[int, ...]], Tensor]
"""Function of a dropout layer's name and a tensor's shape; returns the factors that dropout multiplies the tensor by.
"""


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
            if model.get("attention_gate"):  # each head's gate is behind its queries; ours are behind a group's
                served = model["num_attention_heads"] // groups
                rows[0] = rows[0].unflatten(1, (served, 2, -1)).transpose(1, 2).flatten(1, 3)
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
    has_routers = hasattr(theirs.config, "router_aux_loss_coef") and getattr(theirs.config, "num_experts", 1)
    kept = kept if has_routers else {}
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


TOLERANCE = 1e-10
VOCAB, LENGTH, ROWS = 61, 13, (5, 2, 9)
"""ROWS: of the samples in the global batch."""
SEED, STEP = 77, 4

SHARED_SIZES = {"vocab_size": VOCAB, "num_attention_heads": 6, "max_position_embeddings": 32}
GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32, "n_inner": 40}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT = {**SHARED_SIZES, "hidden_size": 24, "num_layers": 2, "ffn_hidden_size": 40}
THEIRS = {**SHARED_SIZES, "hidden_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 40}
THEIRS |= {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
OURS: dict[str, Any] = {**GPT, "architecture": "llama", "num_key_value_heads": 2, "norm_eps": 1e-5, "rope_theta": 50.0}
MIXTURE = {"num_experts": 5, "experts_per_token": 2}
QWEN_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2, GPT),
    "gpt2 untied": (
        "gpt2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
        GPT | {"tie_embeddings": False, "activation": "gelu", "norm_eps": 1e-3},
    ),
    "llama": ("llama", THEIRS, OURS),
    "llama tied, scaled positions": (
        "llama",
        THEIRS
        | {"tie_word_embeddings": True, "head_dim": 6}
        | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 50.0, "factor": 3.0}},
        OURS
        | {"tie_embeddings": True, "head_dim": 6, "rope_scaling": "llama3", "rope_factor": 3.0}
        | {"rope_low_frequency_factor": 1.0, "rope_high_frequency_factor": 4.0, "rope_original_positions": 8},
    ),
    "qwen2": (
        "qwen2",
        THEIRS | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        OURS | {"num_layers": 3, "qkv_bias": True, "sliding_window": 4, "full_attention_layers": 1},
    ),
    "qwen3": ("qwen3", THEIRS | {"head_dim": 6}, OURS | {"qk_norm": True, "head_dim": 6}),
    "mistral": ("mistral", THEIRS | {"sliding_window": 5}, OURS | {"sliding_window": 5}),
    "mixtral": (
        "mixtral",
        THEIRS | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        OURS | MIXTURE | {"router_aux_loss": 0.7, "router_z_loss": 0.3},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        THEIRS | QWEN_MOE | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [0], "sliding_window": None},
        OURS
        | {"num_experts": 5, "expert_ffn_hidden_size": 14, "normalize_expert_weights": False, "dense_layers": 1}
        | {"shared_expert_ffn_hidden_size": 20, "shared_expert_gate": True, "qkv_bias": True, "router_aux_loss": 0.5},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        THEIRS | QWEN_MOE | {"norm_topk_prob": True, "head_dim": 6},
        OURS | {"num_experts": 5, "expert_ffn_hidden_size": 14, "qk_norm": True, "head_dim": 6},
    ),
    "gated attention of qwen3_next": (
        "qwen3_next",
        THEIRS
        | {"layer_types": ["full_attention"] * THEIRS["num_hidden_layers"], "num_experts": 0, "head_dim": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        OURS
        | {"head_dim": 8, "attention_gate": True, "qk_norm": True, "norm_offset": True, "rotary_share": 0.5}
        | {"rope_theta": 1e4},
    ),
}
RATES = {"embed": 0.15, "residual": 0.35, "attention": 0.25}
"""Of dropout, one of a kind each, so that none can stand for another."""
DROPPED = ("residual", "attention", "embed residual attention")
"""Kinds that are dropped together."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, which takes seconds to import."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would wait for each other longer than such small products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def our_model(settings: dict[str, Any], weights: dict[str, Tensor]) -> Decoder:
    """Our model with these weights: all that it has, and no others."""
    given = {"model": settings, "data": {"path": "unused", "sequence_length": LENGTH}}
    model = make_model(resolve(Config.model_validate(given), VOCAB).model).double().train()
    assert isinstance(model, Decoder)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        assert parameter.shape == weights[name].shape, name
        parameter.data = weights[name].clone()
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which some are ignored, another number in each row."""
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, len(ROWS), LENGTH), generator=draw)
    labels[0, 3:5] = labels[1, :9] = IGNORE_INDEX
    return tokens, labels


def some_documents() -> Tensor:
    """Of several tokens, of one, and whole rows."""
    starts = torch.zeros(len(ROWS), LENGTH, dtype=torch.int64)
    starts[0, [4, 5, 9]] = starts[2, 7] = 1
    return starts.cumsum(1)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that are not ignored, by its definition."""
    counted = labels != IGNORE_INDEX
    exponents = logits.exp().sum(-1).log() - logits.gather(-1, labels.clamp(0).unsqueeze(-1)).squeeze(-1)
    return (exponents * counted).sum() / counted.sum()


def router_losses(routers: tuple[Tensor, ...], labels: Tensor, settings: dict[str, Any]) -> Tensor:
    """Load balancing by transformers' own function, layer by layer and sequence by sequence, as ours is; it counts each
    of a token's experts as a whole, ours as a share of one."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    counted, total = (labels != IGNORE_INDEX).double(), torch.zeros((), dtype=torch.float64)
    experts, chosen = settings.get("num_experts", 0), settings.get("experts_per_token", 2)
    for layer in routers:
        for row, logits in enumerate(layer.unflatten(0, labels.shape)):
            with Fp64():
                balance = load_balancing_loss_func((logits,), experts, chosen, counted[row].unsqueeze(0)) / chosen
            stray = (logits.exp().sum(-1).log().square() * counted[row]).sum()
            total = total + settings.get("router_aux_loss", 0.0) * balance * counted[row].sum()
            total = total + settings.get("router_z_loss", 0.0) * stray
    return total / counted.sum()


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Every parameter's gradient, of which none is zero."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        largest = gradient.abs().max()
        assert largest > 1e-4, name
        assert (ours[name] - gradient).abs().max() / largest <= TOLERANCE, name


def compare(
    transformers: Any, name: str, documents: Tensor | None = None, dropped: tuple[str, ...] = (), drop: bool = False
) -> None:
    """One batch through both models.

    Args:
        transformers: the library.
        name: of the model.
        documents: which attention keeps apart.
        dropped: kinds of dropout, of `RATES`; those not named have rate 0.
        drop: whether there is dropout.
    """
    kind, given, settings = MODELS[name]
    rates = {each: rate if each in dropped else 0.0 for each, rate in RATES.items()}

    def factors(place: str, shape: tuple[int, ...]) -> Tensor:
        sort = "embed" if place.startswith("embed") else "attention" if ".core." in place else "residual"
        if kind != "gpt2" and sort == "embed":
            sort = "residual"
        return dropout_factors(SEED, STEP, ROWS, place, shape, rates[sort])

    theirs = random_model(transformers, kind, given)
    rated = {"hidden_dropout": rates["residual"], "attention_dropout": rates["attention"]}
    if kind == "gpt2":
        rated["embedding_dropout"] = rates["embed"]
    weights = {key: parameter.detach() for key, parameter in theirs.named_parameters()}
    ours = our_model(settings | (rated if drop else {}), under_our_names(weights, settings))
    tokens, labels = batch()
    counted = labels != IGNORE_INDEX

    logits, routers = logits_and_routers(theirs, tokens, documents, factors if drop else None)
    expected = mean_loss(logits, labels)
    (expected + router_losses(routers, labels, settings)).backward()
    keys = sample_keys(SEED, STEP, torch.tensor(ROWS)) if drop else None
    positions = positions_in(documents) if documents is not None and kind == "gpt2" else None
    samples = SampleInfo(keys, documents, counted.double() / counted.sum(), positions)
    loss = ours(tokens, labels, samples) / counted.sum()
    loss.backward()

    assert abs(loss.item() / expected.item() - 1) <= TOLERANCE
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    same({key: each.grad for key, each in ours.named_parameters()}, under_our_names(gradients, settings))


@pytest.mark.parametrize("name", MODELS)
def test_gradients(transformers: Any, name: str) -> None:
    compare(transformers, name)


@sweep("name", MODELS, quick=(0, 4, 6))
def test_gradients_of_packed_documents(transformers: Any, name: str) -> None:
    compare(transformers, name, some_documents())


@pytest.mark.parametrize(
    ("name", "places"),
    [("gpt2", "embed"), *((name, places) for name in ("gpt2", "llama", "mixtral") for places in DROPPED)],
)
def test_gradients_with_dropout(transformers: Any, name: str, places: str) -> None:
    """Dropout of one kind alone, and of all; Llama's embeddings have that of the blocks."""
    compare(transformers, name, None, tuple(places.split()), drop=True)


@sweep("name", MODELS, quick=(4,), slow=slice(0, None, 2))
def test_gradients_with_dropout_in_documents_and_windows(transformers: Any, name: str) -> None:
    """Whose attention draws its masks tile by tile."""
    compare(transformers, name, some_documents(), tuple(RATES), drop=True)


def gradients_at(case: Case, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The engine's initial weights on this rank, and its gradients and its part of the mean loss of a step."""
    engine = make_engine(case)
    weights = whole_tensors(engine, "master")
    loss, _ = engine.compute_gradients(shard_of(case, step, engine.mesh.dp.index), step)
    return weights, whole_tensors(engine, "gradient"), float(loss)


@sweep("layout", [(1, 1, 1), (2, 2, 2), (1, 3, 1)], quick=(0,), ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_engine_drops_by_seed_step_and_row(
    transformers: Any, pool: WorkerPool, layout: tuple[int, int, int], accumulation: int
) -> None:
    """The gradients of a run's fourth step, whose seed is 11, against masks by hand."""
    case = Case(dtype="fp64", dropout=0.2, accumulation=accumulation, batch=12).with_layout(*layout)
    ranks = pool.run(case.world_size, gradients_at, case, 3)
    model = case.config.model
    sizes = {"vocab_size": case.vocab, "n_embd": model.hidden_size, "n_layer": case.layers, "n_head": case.heads}
    sizes |= {"n_inner": case.ffn, "n_positions": model.max_position_embeddings, "layer_norm_epsilon": model.norm_eps}
    theirs = random_model(transformers, "gpt2", GPT2 | sizes)
    weights = {name: weight for rank in ranks for name, weight in rank[0].items()}
    set_weights(theirs, weights, {"num_attention_heads": case.heads})
    whole = shard_of(case.unsplit, 3, 0)

    def factors(place: str, shape: tuple[int, ...]) -> Tensor:
        return dropout_factors(11, 3, range(case.batch), place, shape, 0.2)

    logits, _ = logits_and_routers(theirs, whole.tokens, None, factors)
    loss = mean_loss(logits, whole.labels)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = under_our_names(expected, {"num_attention_heads": case.heads})
    for _, gradients, _ in ranks:
        same(gradients, {name: expected[name] for name in gradients})
    assert {name for _, gradients, _ in ranks for name in gradients} == expected.keys()
    if layout == (1, 1, 1):
        assert ranks[0][2] == pytest.approx(loss.item(), rel=TOLERANCE)


def test_masks_by_hand_are_those_of_the_package() -> None:
    """Another seed, step, row, name or rate gives others; the share that is dropped, and the scale."""
    given: dict[str, Any] = {"seed": 5, "step": 3, "rows": (0, 4, 1 << 40), "name": "blocks.3.dropout.mlp"}
    given |= {"shape": (3, 7, 40, 50), "p": 0.3}
    others = [("seed", 6), ("step", 4), ("rows", (1, 5, 2)), ("name", "blocks.4.dropout.mlp"), ("p", 0.4)]
    masks = []
    for change in ({}, *({key: value} for key, value in others)):
        facts = given | change
        dropout = Dropout(facts["p"], facts["name"])
        keys = sample_keys(facts["seed"], facts["step"], torch.tensor(facts["rows"]))
        found = dropout(torch.ones(facts["shape"], dtype=torch.float64), keys)
        assert torch.equal(found, dropout_factors(**facts))
        assert set(found.unique().tolist()) == {0.0, 1 / (1 - facts["p"])}
        kept = found > 0
        assert kept.double().mean() == pytest.approx(1 - facts["p"], abs=0.01)
        masks.append(kept)
    for first, second in combinations(masks[:-1], 2):  # independent masks agree on 0.3² + 0.7² of their elements
        assert (first == second).double().mean() == pytest.approx(0.58, abs=0.02)
    for first, second in combinations(masks[0], 2):
        assert (first == second).double().mean() == pytest.approx(0.58, abs=0.02)
