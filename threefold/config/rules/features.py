"""Every feature that may be combined with others, its settings, and which combinations are supported.

The table in docs/compatibility.md is made from here and from the checks of a config; the test suite runs every pair.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.config.rules.compatibility import RULES, Rule
from threefold.config.schedules import SCHEDULES, TorchSchedule
from threefold.config.schema import Config
from threefold.errors import UserError

Settings = dict[str, Any]
"""`section.key` → value."""


@dataclass(frozen=True, eq=False)
class Feature:
    """Something to switch on.

    Attributes:
        name: short, as in the table.
        title: what it is.
        settings: what switches it on.
        needs: the settings that it requires, at least; another feature may require larger ones.
        part_of: names that rules may call it by too: what it is a kind of, and what it needs.
    """

    name: str
    title: str
    settings: Settings
    needs: Settings = field(default_factory=dict)
    part_of: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.name, *self.part_of))

    def excludes(self, other: "Feature") -> bool:
        """Whether both are values of one setting, so that there is nothing to combine."""
        return any(self.settings[key] != other.settings[key] for key in self.settings.keys() & other.settings.keys())


def _schedule(row: TorchSchedule) -> Feature:
    micro_batches = next(count for count in (2, 4) if row.accepts(2, count))
    needs = {"parallel.pp": 2, "train.gradient_accumulation_steps": micro_batches}
    deferring = ("zero-bubble",) if row.defers_weight_gradients and row.name != "zero-bubble" else ()
    title = f"pipeline schedule `{row.name}`"
    return Feature(row.name, title, {"parallel.schedule": row.name}, needs, ("pp", *deferring))


def _zero(stage: int, shares: str) -> Feature:
    return Feature(
        f"zero{stage}",
        f"ZeRO stage {stage}: {shares} shared",
        {"parallel.zero": stage},
        {"parallel.dp": 2},
        ("dp", "zero"),
    )


FEATURES: tuple[Feature, ...] = (
    Feature("dp", "data parallelism", {"parallel.dp": 2}),
    Feature("tp", "tensor parallelism", {"parallel.tp": 2}),
    Feature("pp", "pipeline parallelism, schedule `1f1b`", {"parallel.pp": 2}),
    Feature(
        "cp", "context parallelism, keys and values gathered", {"parallel.cp_method": "all-gather"}, {"parallel.cp": 2}
    ),
    Feature("ring", "context parallelism as a ring", {"parallel.cp_method": "ring"}, {"parallel.cp": 2}, ("cp",)),
    Feature("sp", "sequence parallelism", {"parallel.sequence_parallel": True}, {"parallel.tp": 2}, ("tp",)),
    *(_schedule(row) for row in SCHEDULES.values() if row.name != "1f1b"),
    _zero(1, "optimizer states"),
    _zero(2, "optimizer states and gradients"),
    _zero(3, "optimizer states, gradients and weights"),
    Feature(
        "hybrid",
        "ZeRO among some of the replicas",
        {"parallel.zero_shards": 2},
        {"parallel.dp": 4, "parallel.zero": 1},
        ("dp", "zero"),
    ),
    Feature(
        "selective",
        "attention computed again in the backward pass",
        {"train.recompute": "selective"},
        {},
        ("recompute",),
    ),
    Feature("full", "blocks computed again in the backward pass", {"train.recompute": "full"}, {}, ("recompute",)),
    Feature("chunked", "the logits some columns at a time", {"train.loss_chunk_size": 5}),
    Feature("bf16", "bf16 with fp32 masters", {"precision.dtype": "bf16", "precision.master_weights": True}),
    Feature("fp16", "fp16 with a loss scale and fp32 masters", {"precision.dtype": "fp16"}),
    Feature(
        "pure-bf16",
        "bf16 without fp32 masters",
        {"precision.dtype": "bf16", "precision.master_weights": False},
    ),
    Feature(
        "compressed",
        "gradients summed in 16 bits",
        {"parallel.gradient_compression": "fp16"},
        {"parallel.dp": 2, "precision.dtype": "fp32"},
        ("dp", "compression"),
    ),
    Feature("compile", "compiled layers", {"train.compile": True}),
    Feature("tied", "tied embeddings", {"model.tie_embeddings": True}),
    Feature("documents", "attention that stops at documents", {"data.separate_documents": True}),
    Feature("rope", "rotary positions", {"model.position_embedding": "rope"}),
    Feature(
        "llama",
        "GQA, QK-norm, a sliding window, SwiGLU",
        {"model.architecture": "llama"},
        {"model.num_key_value_heads": 2, "model.sliding_window": 5, "model.qk_norm": True},
    ),
    Feature(
        "experts",
        "a mixture of experts with a capacity and its losses",
        {"model.num_experts": 4},
        {
            "model.architecture": "llama",
            "model.expert_capacity_factor": 1.0,
            "model.router_aux_loss": 0.1,
            "model.router_z_loss": 0.1,
        },
    ),
    Feature(
        "ep",
        "experts shared among replicas",
        {"parallel.ep": 2},
        {"parallel.dp": 2, "model.num_experts": 4, "model.architecture": "llama"},
        ("dp", "experts"),
    ),
    Feature("dropout", "dropout", {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}),
    Feature("accumulation", "several micro-batches a step", {"train.gradient_accumulation_steps": 2}),
)
SIXTEEN_BIT = ("bf16", "fp16", "pure-bf16", "compressed")
"""Features that compute or sum in 16 bits, whose results are near those of fp64 but not equal up to its rounding."""

_BASE: dict[str, Settings] = {
    "data": {"path": "tokens", "sequence_length": 8},
    "model": {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 37,
        "max_position_embeddings": 9,
        "initializer_range": 0.1,
        "tie_embeddings": False,
    },
    "train": {"global_batch_size": 16, "gradient_accumulation_steps": 1, "device": "cpu", "seed": 3},
    "precision": {"dtype": "fp64"},
    "optimizer": {"warmup_steps": 0, "lr": 3e-3, "eps": 1e-5},
}
"""A small model with nothing switched on."""


def config_with(features: Iterable[Feature]) -> Config:
    """A small config with these features on, resolved.

    Raises:
        UserError: they cannot be combined.
    """
    chosen = tuple(features)
    settings: Settings = {}
    for feature in chosen:
        for key, value in feature.needs.items():
            settings[key] = max(value, settings.get(key, value))
    for feature in chosen:
        for key, value in feature.settings.items():
            counts = isinstance(value, int) and not isinstance(value, bool) and key != "parallel.zero"
            settings[key] = max(value, settings.get(key, value)) if counts else value
    sections = {name: dict(values) for name, values in _BASE.items()}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return resolve(config_of(sections), vocab_size=1)


@dataclass(frozen=True)
class Cell:
    """Two features side by side.

    Attributes:
        reason: why they cannot be combined, the sentence of the error; empty where they can.
    """

    first: Feature
    second: Feature
    reason: str = ""

    @property
    def works(self) -> bool:
        return not self.reason

    @property
    def rule(self) -> Rule | None:
        """The rule that names both features, or what they are kinds of or need."""
        pair = (self.first.names, self.second.names)
        for rule in RULES:
            if any(rule.first in one and rule.second in other for one, other in (pair, pair[::-1])):
                return rule
        return None


def cells() -> Iterator[Cell]:
    """Every pair of features that is not two values of one setting."""
    for first, second in combinations(FEATURES, 2):
        if first.excludes(second):
            continue
        try:
            config_with((first, second))
            yield Cell(first, second)
        except UserError as error:
            yield Cell(first, second, str(error))


_INTRODUCTION = """\
# Compatibility of features

<!-- Written by `make docs` from threefold/config/rules/features.py and compatibility.py. -->

✓: the two together give the results of one process, up to rounding; the test suite runs every such pair. A number: the
config is refused before any worker starts, with a sentence such as the one below. –: two values of one setting.
"""


def markdown() -> str:
    """The page: the features, the table of every pair, the reasons."""
    found = {frozenset((cell.first.name, cell.second.name)): cell for cell in cells()}
    reasons: dict[Rule | None, str] = {}
    for cell in found.values():
        if not cell.works:
            reasons.setdefault(cell.rule, cell.reason)
    numbers = {rule: str(number) for number, rule in enumerate(reasons, 1)}
    lines = [_INTRODUCTION, "| | feature | switched on by |", "|---|---|---|"]
    lines += [f"| **{feature.name}** | {feature.title} | {_switches(feature)} |" for feature in FEATURES]
    lines += ["", "| | " + " | ".join(feature.name for feature in FEATURES) + " |", "|---|" + ":-:|" * len(FEATURES)]
    for row in FEATURES:
        others = ((column, found.get(frozenset((row.name, column.name)))) for column in FEATURES)
        marks = (_alone(row is column) if cell is None else _mark(cell, numbers) for column, cell in others)
        lines.append(f"| **{row.name}** | " + " | ".join(marks) + " |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons.values(), 1))]
    return "\n".join(lines) + "\n"


def _switches(feature: Feature) -> str:
    given = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in feature.settings.items())
    needs = ", ".join(
        f"`{key}` {_yaml(value)}" + (" or more" if type(value) is int else "") for key, value in feature.needs.items()
    )
    return f"{given}; needs {needs}" if needs else given


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _alone(same: bool) -> str:
    return " " if same else "–"


def _mark(cell: Cell, numbers: dict[Rule | None, str]) -> str:
    return "✓" if cell.works else numbers[cell.rule]
