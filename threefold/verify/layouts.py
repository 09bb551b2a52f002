"""Layouts that verify compares, and the small configs that they run; without torch.

Exact runs come at the end: the layouts inside the grain, and the layouts outside it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from math import gcd, lcm
from pathlib import Path
from typing import Any

from threefold.comm.layout import SCHEDULES, Layout, LayoutSpec, parse
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.model import CUSTOM, ModelConfig
from threefold.config.optimizer import hyper_parameters
from threefold.config.rules import batch_sizes
from threefold.config.schedules import StageSchedule, find_schedule
from threefold.config.section import nearest_divisor
from threefold.data.formats.custom_data import is_custom_data, is_nested
from threefold.data.formats.registry import holds_tokens
from threefold.errors import UserError
from threefold.exact.rules import GRAIN, takes_context_pieces
from threefold.models.sharding import matches

_HEAD_DIM, _VOCABULARY, _SEQUENCE, _LAYERS, _SERVED, _EXPERTS = 4, 64, 12, 3, 2, 4
"""Target sizes of shrinking, unless a layout needs more."""
_HIDDEN = 8
"""Smallest hidden size, unless the model's is smaller: norms of fewer features amplify rounding."""
_LATENT = {"query_rank": 6, "key_value_rank": 7, "plain_head_dim": 3, "rope_head_dim": 4, "value_head_dim": 5}
"""Those of latent attention, whose widths are all different."""
_DROPOUT = 0.1
"""Dropout of the second run if the config has none."""
_WINDOW = 2
"""Sliding window of the second run, which ends inside a chunk of at least three positions."""
_SHORTEST_WINDOW = 2
"""Shortest sliding window of shrinking: in one position, the gradients of queries and keys are rounding alone."""
_SOFTCAP = 0.5
"""Largest soft cap of attention scores in the second run, which the small scores of a shrunk model reach."""
_DECAY = 8
"""Steps of the second run's decay, so that each of its five updates has a learning rate of its own."""
_OTHER_SCALING = {"match_rms_adamw": "original", "original": "match_rms_adamw"}
UNKNOWN_VOCABULARY = 8191
"""Vocabulary size if neither config nor data has one; odd, so that its shards are uneven."""
UNKNOWN_EXACT_VOCABULARY = 8192
"""Vocabulary size of an exact run if neither has one; even, so that the tensor axis can be inside the grain."""
LEAST_EPS = 1e-5
"""Smallest eps of Adam: with 1e-8, gradients that are rounding noise become updates that dominate later steps."""
Settings = dict[str, dict[str, Any]]


def prepare(config: Config, dtype: str, vocab_size: int) -> Config:
    """Return the config of the single process: resolved, on the CPU, in `dtype`, not compiled.

    The eps of Adam and Muon is at least `LEAST_EPS`. The data's `vocab_size` applies if the config sets none.
    """
    settings = _settings(config)
    partition = settings["parallel"].get("partition")
    settings["parallel"] = {"partition": partition} if isinstance(config.parallel.partition, str) else {}  # a rule
    settings["precision"] = {"dtype": dtype}
    batch = batch_sizes(config, largest=1)["global_batch_size"]
    settings["train"].update(device="cpu", compile=False, global_batch_size=batch)
    if "eps" in hyper_parameters(config.optimizer.name):
        settings["optimizer"]["eps"] = max(config.optimizer.eps, LEAST_EPS)
    groups = zip(config.optimizer.groups or (), config.optimizer.parts[1:], strict=True)
    settings["optimizer"]["groups"] = [
        {**group, "eps": max(part.config.eps, LEAST_EPS)} if "eps" in hyper_parameters(part.config.name) else group
        for group, part in groups
    ] or None
    settings["model"].setdefault("vocab_size", vocab_size)
    return resolve(config_of(settings), vocab_size=1)


def shrink(config: Config, specs: Sequence[LayoutSpec], batch_alone: bool = False) -> Config:
    """Return a prepared config with fewer layers, heads and tokens, large enough for every layout.

    Widths keep their ratios, an odd vocabulary stays odd, a wider initialization preserves the magnitude of
    activations, and the batch is the smallest that every layout can divide. Nothing grows. The warm-up is at most one
    step, so that the few steps use the full learning rate. A user's own data set determines the length of its samples,
    so the sequence length stays. If `batch_alone`, the model keeps its size.
    """
    settings = _settings(config)
    fewest = (each.layout.dp * (_schedule(each).micro_batches or each.layout.pp) for each in specs)
    settings["train"]["global_batch_size"] = 2 * lcm(*fewest)
    settings["optimizer"]["warmup_steps"] = min(config.optimizer.warmup_steps, 1)
    if batch_alone:
        return resolve(config_of(settings), vocab_size=1)
    model, sequence = config.model, config.data.sequence_length
    if not any(map(is_custom_data, config.data.corpora)):
        # Lengths that both chunks of a context-parallel rank and sequence parallelism divide.
        unit = lcm(*((2 * each.cp if each.cp > 1 else 1) * each.tp for each in (spec.layout for spec in specs)))
        sequence = min(sequence, -(-_SEQUENCE // unit) * unit)
    sizes = {**_widths(model, specs), **_lengths(config, sequence)}
    sizes["num_layers"] = layers = min(model.num_layers, max(_LAYERS, *map(stages, specs)))
    if model.attention_pattern:
        sizes["attention_pattern"] = _kinds_of_attention(model, layers)
    if config.optimizer.frozen:
        settings["optimizer"]["frozen"] = _frozen_blocks(config.optimizer.frozen, model.num_layers, layers)
    used = type(model).model_fields.keys() - {name for name, _ in model.unused()}
    settings["model"].update({name: size for name, size in sizes.items() if name in used})
    settings["data"]["sequence_length"] = sequence
    if chunk := config.train.loss_chunk_size:  # keep the number of chunks
        vocab = settings["model"]["vocab_size"]
        settings["train"]["loss_chunk_size"] = max(1, round(chunk * vocab / model.vocab_size))
    return resolve(config_of(settings), vocab_size=1)


def _widths(model: ModelConfig, specs: Sequence[LayoutSpec]) -> dict[str, Any]:
    tp = lcm(*(spec.layout.tp for spec in specs))
    groups = min(model.num_key_value_heads, lcm(2, tp))
    if model.num_key_value_heads % groups or groups % tp:
        groups = model.num_key_value_heads
    sharing = tp // gcd(groups, tp)  # ranks that share a key-value head and divide its query heads
    served = model.num_attention_heads // model.num_key_value_heads
    heads = groups * min(served, -(-_SERVED // sharing) * sharing)
    head_dim = min(model.head_dim, _HEAD_DIM - model.head_dim % 2)
    latent = {name: min(getattr(model, name), most) for name, most in _LATENT.items()} if model.key_value_rank else {}
    if latent:
        head_dim = latent["plain_head_dim"] + latent["rope_head_dim"]
    while model.rotary_share < 1 and int(head_dim * model.rotary_share) % 2 + (head_dim * model.rotary_share < 2):
        head_dim += 2  # until whole pairs of features are rotated
    pairs = (latent["rope_head_dim"] if latent else int(head_dim * model.rotary_share)) // 2
    factors = {name: _some(getattr(model, name), pairs) for name in ("rope_short_factors", "rope_long_factors")}
    hidden = round(heads * head_dim * model.hidden_size / (model.num_attention_heads * model.head_dim))
    hidden = max(hidden, min(model.hidden_size, _HIDDEN))

    def inner(width: int) -> int:
        return min(width, max(1, round(hidden * width / model.hidden_size / tp)) * tp)

    experts = min(model.num_experts, lcm(_EXPERTS, *(spec.layout.ep for spec in specs)))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "hidden_size": hidden,
        **latent,
        **factors,
        "ffn_hidden_size": inner(model.ffn_hidden_size),
        "expert_ffn_hidden_size": inner(model.expert_ffn_hidden_size),
        "shared_expert_ffn_hidden_size": inner(model.shared_expert_ffn_hidden_size),
        "num_experts": experts,
        "experts_per_token": min(model.experts_per_token, max(1, experts // 2)),
        **_router_groups(model, experts),
        "vocab_size": min(model.vocab_size, _VOCABULARY + 3 * (model.vocab_size % 2)),
        "initializer_range": float(f"{model.initializer_range * (model.hidden_size / hidden) ** 0.5:.3g}"),
    }


def _some(factors: Sequence[float], count: int) -> tuple[float, ...]:
    """Return `count` of some factors, at equal distances."""
    return tuple(factors[number * len(factors) // count] for number in range(count)) if factors else ()


def _kinds_of_attention(model: ModelConfig, layers: int) -> list[str]:
    """Return the kinds of the first layers, the last of which is of the other kind if they would have one alone."""
    every = ["sliding" if model.window(layer) else "full" for layer in range(model.num_layers)]
    kinds = every[:layers]
    others = [kind for kind in every[layers:] if kind not in kinds]
    return [*kinds[:-1], others[0]] if others else kinds


def _frozen_blocks(patterns: Sequence[str], before: int, layers: int) -> list[str]:
    """Return patterns of frozen parameters for `layers` blocks, each of which stands for one of the blocks before.

    If there are enough, each choice of frozen parts that a block had before has a block.
    """

    def frozen_in(number: int) -> tuple[str, ...]:
        found = (pattern.split(".") for pattern in patterns if matches(str(number), _number_in(pattern) or "-"))
        return tuple(dict.fromkeys(".".join(parts[2:]) for parts in found))

    kinds = {frozen_in(number): number for number in reversed(range(before))}
    spread = [number * (before - 1) // max(1, layers - 1) for number in range(layers)]
    stand_ins = sorted([*dict.fromkeys([*kinds.values(), *spread, *range(before)])][:layers])
    found = [pattern for pattern in patterns if _number_in(pattern) is None]
    for number, stand_in in enumerate(stand_ins):
        found += [f"blocks.{number}.{part}".rstrip(".") for part in frozen_in(stand_in)]
    return found


def _number_in(pattern: str) -> str | None:
    """Return the part of a pattern that names some blocks by their numbers; None if it has none."""
    first, *rest = pattern.split(".")
    return rest[0] if first == "blocks" and rest and rest[0] not in ("*", "**") else None


def _router_groups(model: ModelConfig, experts: int) -> dict[str, int]:
    """Return the groups of fewer experts: at least two in each, and enough groups chosen for a token's experts."""
    groups, chosen = model.router_groups, model.router_groups_chosen
    if groups and experts < model.num_experts:
        groups = nearest_divisor(groups, experts // 2)
        chosen = (groups + 1) // 2
    return {"router_groups": groups, "router_groups_chosen": chosen}


def _lengths(config: Config, sequence: int) -> dict[str, Any]:
    """Return the settings that count positions and layers, for a shorter sequence and fewer layers."""
    model = config.model
    positions = sequence + (2 if model.max_position_embeddings > config.data.sequence_length else 0)

    def cut(length: int) -> int:
        return max(1, round(length * sequence / config.data.sequence_length)) if length else 0

    return {
        "max_position_embeddings": positions,
        "sliding_window": max(cut(model.sliding_window), min(model.sliding_window, _SHORTEST_WINDOW)),
        "rope_original_positions": min(cut(model.rope_original_positions), positions),
        "full_attention_layers": min(model.full_attention_layers, 1),
        "dense_layers": min(model.dense_layers, 1),
        "moe_every": min(model.moe_every, 2),
    }


def compose(base: Config, spec: LayoutSpec) -> Config:
    """Return the resolved config of `base` in a layout.

    It has two micro-batches per pipeline stage, or two without a pipeline; fewer if the batch size is not divisible.
    Raises a `UserError` for an unsupported layout.
    """
    settings = _settings(base)
    layout = spec.layout
    settings["parallel"].update(dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    for key in ("stage_chunks", "zero_shards"):
        settings["parallel"].pop(key, None)
    for key, value in spec.settings:
        section, name = key.split(".")
        settings[section][name] = value
    samples = base.train.global_batch_size // layout.dp
    if not base.train.global_batch_size % layout.dp and "gradient_accumulation_steps" not in settings["train"]:
        fixed = _schedule(spec).micro_batches
        counts = [fixed] if fixed else [2 * layout.pp, layout.pp, 1]
        wanted = next((count for count in counts if samples % count == 0), None)
        settings["train"]["gradient_accumulation_steps"] = wanted
    return resolve(config_of(settings), vocab_size=1)


def with_further_features(config: Config, attention_dropout: bool, documents: bool) -> Config:
    """Return the config of the second run: with dropout if model and adapters support it, and with packed documents.

    Attention drops too if `attention_dropout`; otherwise as in `config`. Documents are kept apart if `documents`. A
    sliding window ends inside a chunk of a context-parallel rank, a soft cap bends scores, Muon scales its updates in
    its other way, and the learning rate changes at each step.
    """
    is_custom, settings, optimizer = config.model.architecture == CUSTOM, _settings(config), config.optimizer
    if optimizer.name == "muon":
        settings["optimizer"]["lr_scaling"] = _OTHER_SCALING[optimizer.lr_scaling]
    settings["optimizer"]["groups"] = [
        {**group, "lr_scaling": _OTHER_SCALING[part.config.lr_scaling]} if part.config.name == "muon" else group
        for group, part in zip(optimizer.groups or (), optimizer.parts[1:], strict=True)
    ] or None
    settings["optimizer"] |= {
        "decay": "linear" if optimizer.decay == "constant" else optimizer.decay,
        "decay_steps": _DECAY,
        "warmup_steps": min(optimizer.warmup_steps, 1),
        "stable_steps": min(optimizer.stable_steps, 2),
        "min_lr": optimizer.lr / 10 if optimizer.min_lr == optimizer.lr else optimizer.min_lr,
    }
    if is_custom:
        return resolve(config_of(settings), vocab_size=1)
    if config.model.sliding_window:
        settings["model"]["sliding_window"] = min(config.model.sliding_window, _WINDOW)
    if config.model.attention_softcap:
        settings["model"]["attention_softcap"] = min(config.model.attention_softcap, _SOFTCAP)
    unused = {name for name, _ in config.model.unused()}
    for name in ("hidden_dropout", *(["attention_dropout"] if attention_dropout else [])):
        if name not in unused:
            settings["model"][name] = getattr(config.model, name) or _DROPOUT
    settings["data"]["separate_documents"] = documents
    inner = all(each.startswith("blocks.") for each in config.adapter.targets or ())
    if config.adapter.rank and inner and not config.model.num_experts:  # others cannot drop by the samples' keys
        settings["adapter"]["dropout"] = config.adapter.dropout or _DROPOUT
    return resolve(config_of(settings), vocab_size=1)


def stages(spec: LayoutSpec) -> int:
    """Return the number of pipeline stages of a layout, over all ranks."""
    pp, schedule = spec.layout.pp, _schedule(spec)
    chunks = schedule.stages_per_rank or spec.setting("parallel.stage_chunks", schedule.default_stages_per_rank)
    return len(schedule.stage_ranks(pp, chunks)) if pp > 1 else 1


def _schedule(spec: LayoutSpec) -> StageSchedule:
    return find_schedule(spec.setting("parallel.schedule", "1f1b"))


def changes(before: Config, after: Config) -> list[str]:
    """Describe the changes by shrinking, as texts such as `8 → 3 layers`."""
    shown = {
        "layers": ("model", "num_layers"),
        "hidden": ("model", "hidden_size"),
        "heads": ("model", "num_attention_heads"),
        "ffn": ("model", "ffn_hidden_size"),
        "experts": ("model", "num_experts"),
        "vocabulary": ("model", "vocab_size"),
        "tokens": ("data", "sequence_length"),
        "sequences a step": ("train", "global_batch_size"),
        "warm-up steps": ("optimizer", "warmup_steps"),
    }
    pairs = {name: [getattr(getattr(config, s), k) for config in (before, after)] for name, (s, k) in shown.items()}
    return [f"{old:,} → {new:,} {name}" for name, (old, new) in pairs.items() if old != new]


def _settings(config: Config) -> Settings:
    """Return the settings that do not depend on the layout; of the batch sizes only the global one."""
    sections = {name: dict(values) for name, values in config.sections().items()}
    sections["model"].pop("preset", None)
    for key in ("micro_batch_size", "gradient_accumulation_steps"):
        sections["train"].pop(key, None)
    return sections


_SECOND_EVERY = 3
"""Interval of second runs in the quick default selection: a second run takes as long as the first."""
Check = Callable[[Config], None]
"""Check that raises a `UserError` if a layout's resolved config does not suit the model."""


def suits(config: Config) -> None:
    """Accept every config, for models described by the config alone, whose rules its resolution has checked."""


@dataclass(frozen=True)
class UnsupportedLayout:
    """Unsupported layout, with the error of the config checks."""

    spec: LayoutSpec
    reason: str


@dataclass(frozen=True)
class Selection:
    """Layouts to verify, and those that were left out; every n-th of `specs` makes the second run too."""

    specs: tuple[LayoutSpec, ...]
    unsupported: tuple[UnsupportedLayout, ...] = ()
    second_every: int = 1

    def has_second_run(self, spec: LayoutSpec) -> bool:
        """Return whether a layout makes the second run."""
        return self.specs.index(spec) % self.second_every == 0


def products(ranks: int) -> list[Layout]:
    """Return all factorizations of `ranks` into dp · tp · pp · cp."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [Layout(dp, tp, pp, cp) for dp, tp, pp, cp in product(sizes, repeat=4) if dp * tp * pp * cp == ranks]


def candidates(layout: Layout, experts: int) -> Iterator[LayoutSpec]:
    """Yield the layout with each schedule, ZeRO stage, expert-parallel size and sequence parallelism with an effect.

    Expert-parallel sizes divide the number of the model's `experts`.
    """
    sizes = [ep for ep in range(1, layout.dp + 1) if layout.dp % ep == 0 == experts % ep and (experts or ep == 1)]
    schedules = SCHEDULES if layout.pp > 1 else ("1f1b",)
    stages = range(4) if layout.dp > 1 else (0,)
    shared = (False, True) if layout.tp > 1 else (False,)
    for ep, schedule, zero, sequence in product(sizes, schedules, stages, shared):
        given = {"parallel.schedule": schedule, "parallel.zero": zero, "parallel.sequence_parallel": sequence}
        settings = tuple((key, value) for key, value in given.items() if value not in ("1f1b", 0, False))
        yield LayoutSpec(replace(layout, ep=ep), settings)


def possible(ranks: int, experts: int = 0) -> list[LayoutSpec]:
    """Return all candidates of all factorizations of `ranks`, valid or not."""
    return [spec for layout in products(ranks) for spec in candidates(layout, experts)]


def every(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Select all valid candidates of all factorizations of `ranks`."""
    return by_validity(base, possible(ranks, base.model.num_experts), check)


def by_validity(base: Config, specs: Sequence[LayoutSpec], check: Check = suits) -> Selection:
    """Select the valid ones of some layouts, and list the others with the error of the checks."""
    reasons = {spec: unsupported_because(base, spec, check) for spec in specs}
    unsupported = tuple(UnsupportedLayout(spec, reason) for spec, reason in reasons.items() if reason is not None)
    return Selection(tuple(spec for spec, reason in reasons.items() if reason is None), unsupported)


def covering(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Select each factorization of `ranks` once, with features that cover most pairs (greedy pairwise testing).

    For each one, take the candidate that adds most new pairs of features and single features. The selection thus covers
    each schedule, ZeRO stage, sequence parallelism and recompute mode, and most of their pairs.
    """
    taken: list[LayoutSpec] = []
    seen: set[frozenset[Any]] = set()
    for number, layout in enumerate(products(ranks)):
        tried = candidates(layout, base.model.num_experts)
        found = [spec for spec in tried if unsupported_because(base, spec, check) is None]
        if not found:
            continue
        best = max(found, key=lambda spec: sum(1 if len(each) == 2 else 10 for each in _meetings(spec) - seen))
        seen |= _meetings(best)
        taken.append(_with_extras(base, best, number, check))
    return Selection(tuple(taken), second_every=_SECOND_EVERY)


def asked_for(base: Config, specs: list[LayoutSpec], check: Check = suits) -> Selection:
    """Select the given layouts; raise a `UserError` if one is unsupported."""
    for spec in specs:
        reason = unsupported_because(base, spec, check)
        if reason is not None:
            raise UserError(f"Unsupported layout {spec}: {reason}")
    return Selection(tuple(specs))


def unsupported_because(base: Config, spec: LayoutSpec, check: Check = suits) -> str | None:
    """Return the error of the config checks or the model's check for a layout; None if it is valid."""
    try:
        check(compose(base, spec))
    except UserError as error:
        return str(error)
    return None


def _meetings(spec: LayoutSpec) -> set[frozenset[Any]]:
    layout = spec.layout
    chosen: list[Any] = [*spec.settings, *([("ep", layout.ep)] if layout.ep > 1 else [])]
    facts = [*chosen, *(axis for axis in ("dp", "tp", "pp", "cp") if layout.size(axis) > 1)]
    return {frozenset(pair) for pair in combinations(facts, 2)} | {frozenset([fact]) for fact in chosen}


def _with_extras(base: Config, spec: LayoutSpec, number: int, check: Check) -> LayoutSpec:
    """Return the layout with valid features that `candidates` leaves out: ring attention, recompute, hybrid ZeRO."""
    extras = {
        ("parallel.cp_method", "ring"): spec.layout.cp > 1 and number % 2,
        ("train.recompute", ("none", "selective", "full")[number % 3]): number % 3,
        ("parallel.zero_shards", 2): spec.setting("parallel.zero") and spec.layout.dp > 2,
    }
    return _with_valid(base, spec, [extra for extra, is_wanted in extras.items() if is_wanted], check)


def _with_valid(base: Config, spec: LayoutSpec, extras: Iterable[tuple[str, Any]], check: Check) -> LayoutSpec:
    """Return the layout with those of further settings that are valid, tried one after the other."""
    for extra in extras:
        more = replace(spec, settings=(*spec.settings, extra))
        spec = spec if unsupported_because(base, more, check) else more
    return spec


def prepare_exact(given: Config, dtype: str | None, vocab_size: int) -> Config:
    """Return the exact config of one process, like `prepare`, with its own dtype unless `dtype` is given."""
    settings = given.sections()
    settings["train"]["exact"] = True
    return prepare(config_of(settings), dtype or given.precision.dtype, vocab_size)


def with_context_pieces(base: Config, specs: Sequence[LayoutSpec]) -> Config:
    """Return a prepared config with as many context pieces as the largest cp needs, unless it gives their number."""
    settings, pieces = base.sections(), base.train.grain_context
    if not base.is_given("train.grain_context") and takes_context_pieces(base):
        most = gcd(1 << 30, base.data.sequence_length) // 2
        pieces = max((spec.layout.cp for spec in specs if most and most % spec.layout.cp == 0), default=1)
    settings["train"] |= {"grain_context": pieces} | ({"grain_leaf": 1} if pieces > 1 else {})
    return resolve(config_of(settings), vocab_size=1)


def shrink_exact(base: Config, specs: Sequence[LayoutSpec]) -> Config:
    """Return a prepared config shrunk as by `shrink`, with sizes that its grain divides, and dropout.

    It has the context pieces of `with_context_pieces`. Sample groups have two samples at most.
    """
    train = base.train
    base = with_context_pieces(base, specs)
    pieces, settings = base.train.grain_context, base.sections()
    # The shrunk batch has two samples for each micro-batch that a layout needs.
    group = min(2, train.grain_leaf) if pieces == 1 else 1
    settings["train"] |= {"grain_context": pieces, "grain_leaf": group}
    base = resolve(config_of(settings), vocab_size=1)
    widest = LayoutSpec(Layout(dp=train.grain_samples, cp=pieces, tp=train.grain_tensor))
    # Sizes may be chosen for layouts whose axes within a sample are inside the grain.
    inside = [s for s in specs if base.train.grain_tensor % s.layout.tp == 0 == pieces % s.layout.cp]
    small = shrink(base, [*inside, widest])
    return with_further_features(small, attention_dropout=True, documents=True)


def select_exact(small: Config, ranks: int, everything: bool) -> Selection:
    """Select layouts of `ranks` ranks: all candidates, each with another recompute mode and micro-batch size, or some.

    Unless `everything`, they are those that cover each factorization once.
    """
    settings = small.sections()
    for key in ("exact", *GRAIN, "micro_batch_size", "gradient_accumulation_steps"):
        settings["train"].pop(key, None)
    plain = resolve(config_of(settings), vocab_size=1)
    reasons = {spec: unsupported_because(small, spec) for spec in possible(ranks, small.model.num_experts)}
    outside = tuple(
        UnsupportedLayout(spec, reason)
        for spec, reason in reasons.items()
        if reason is not None and unsupported_because(plain, spec) is None
    )
    if not everything:
        return Selection(covering(small, ranks).specs, outside)
    samples, specs = small.train.global_batch_size, []
    inside = (spec for spec, reason in reasons.items() if reason is None)
    for spec, extras in zip(inside, cycle(_EXTRAS), strict=False):
        most = samples // spec.layout.dp
        given = [(key, most if value == "most" else value) for key, value in extras.items()]
        specs.append(_with_valid(small, spec, given, suits))
    return Selection(tuple(specs), outside)


_EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"train.recompute": "selective"},
    {"train.gradient_accumulation_steps": "most"},
    {"train.recompute": "full", "train.gradient_accumulation_steps": "most"},
    {"train.recompute": "full"},
)
"""Settings that must not change a bit, given to the layouts in turn; `most` makes micro-batches of one sample."""


def parse_layouts(texts: list[str]) -> list[LayoutSpec]:
    """Parse several layouts, one or several (separated by `;`) in each text; drop duplicates."""
    parts = [part.strip() for text in texts for part in text.split(";")]
    return list(dict.fromkeys(parse(part) for part in parts if part))


def names_nested_data(config: Config) -> bool:
    """Return whether a config names a custom dataset without tokens. Raises UserError if there is no dataset."""
    return any(
        is_custom_data(name) and not holds_tokens(Path(name)) and is_nested(name) for name in config.data.corpora
    )
