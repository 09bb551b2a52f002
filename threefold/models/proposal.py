"""Proposes a plan for a model that has none, by the classes and the names of its modules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from threefold.models.plan import Plan, as_pattern
from threefold.models.sharding import Column, Replicated, Row, Split, Vocab

_ATTENTION: Final = frozenset(
    ["q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj", "to_q", "to_k", "to_v", "wq", "wk", "wv"]
)
"""Last parts of names of the linear layers that make queries, keys and values."""
_FEED_FORWARD: Final = frozenset(
    [
        "gate",
        "up",
        "gate_proj",
        "up_proj",
        "fc1",
        "c_fc",
        "fc_in",
        "w1",
        "w3",
        "linear1",
        "intermediate",
        "dense_h_to_4h",
    ]
)
"""The same of those that make the features of a feed-forward block."""
_COLUMN: Final = _ATTENTION | _FEED_FORWARD
"""Last parts of names of linear layers whose output features are cut; the next layer takes its share."""
_ROW: Final = frozenset(
    [
        "o",
        "out",
        "proj",
        "o_proj",
        "out_proj",
        "to_out",
        "wo",
        "down",
        "down_proj",
        "fc2",
        "c_proj",
        "fc_out",
        "w2",
        "linear2",
        "dense",
        "dense_4h_to_h",
    ]
)
"""Of those that take the share."""
_FUSED: Final = frozenset(["qkv", "c_attn", "query_key_value", "wqkv", "in_proj", "qkv_proj", "to_qkv"])
_LOGITS: Final = frozenset(["head", "lm_head", "output", "logits", "unembed", "decoder", "to_logits"])
_POSITIONS: Final = ("pos", "wpe")
_HEADS: Final = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
"""Attributes in which modules commonly have their number of heads."""


@dataclass(frozen=True)
class Proposal:
    """A plan that follows from classes and names.

    Attributes:
        plan: what the modules' names suggest; undecided ones are replicated in it.
        undecided: pattern of a module or bare parameter to why nothing could be said.
    """

    plan: Plan
    undecided: Mapping[str, str] = field(default_factory=dict)

    def source(self) -> str:
        """The plan as Python, to be pasted into the model's file."""
        lines = ["plan = t3.Plan(", f"    layers={_listed(self.plan.layers)},", "    shard={"]
        for pattern, rule in (self.plan.shard or {}).items():
            why = self.undecided.get(pattern)
            lines.append(f"        {_quoted(pattern)}: t3.{_written(rule)},{f'  # undecided: {why}' if why else ''}")
        return "\n".join([*lines, "    },", ")"])


def propose(model: nn.Module) -> Proposal:
    """A plan for a model.

    Args:
        model: the whole model, on any device.
    """
    rules: dict[str, Split] = {}
    undecided: dict[str, str] = {}
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        pattern = as_pattern(name)
        for own, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear | nn.Embedding):
                break
            if not _is_norm(module) and parameter.numel() > 1:
                bare = f"{pattern}.{own}" if pattern else own
                rules[bare] = Replicated()
                undecided[bare] = "a bare parameter; replicated is right unless a cut layer's output meets it"
        if isinstance(module, nn.Embedding):
            rules[pattern] = Replicated() if pattern.rpartition(".")[2].startswith(_POSITIONS) else Vocab()
        elif isinstance(module, nn.Linear) and pattern not in rules:
            rule, why = _of_linear(name, module, model, vocabularies)
            rules[pattern] = rule
            if why:
                undecided[pattern] = why
    return Proposal(Plan(list(_layers(model)), rules), undecided)


def _of_linear(name: str, module: nn.Linear, model: nn.Module, vocabularies: set[int]) -> tuple[Split, str]:
    """The rule of a linear layer, and why there is none where nothing could be said."""
    owner, _, own = name.rpartition(".")
    parent = model.get_submodule(owner)
    beside = {child for child, each in parent.named_children() if isinstance(each, nn.Linear)}
    if module.out_features in vocabularies and (own in _LOGITS or not owner):
        return Vocab(), ""
    if own in _FUSED:
        return Replicated(), "queries, keys and values in one layer; make it three, or order its rows by head"
    heads = next((count for each in _HEADS if isinstance(count := getattr(parent, each, None), int)), 0)
    if own in _COLUMN and beside & _ROW:
        fits = own in _ATTENTION and heads > 0 and module.out_features % heads == 0
        return Column(heads=heads if fits else 0), ""
    if own in _ROW and beside & _COLUMN:
        fits = bool(beside & _ATTENTION) and heads > 0 and module.in_features % heads == 0
        return Row(heads=heads if fits else 0), ""
    if own in _COLUMN or own in _ROW:
        return Replicated(), f"no {'Row' if own in _COLUMN else 'Column'} beside it that it could go with"
    if module.out_features in vocabularies:
        return Vocab(), ""
    return Replicated(), "its name says nothing"


def _layers(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """The modules that a model seems to run through: its children, and those of lists inside."""
    for name, child in model.named_children():
        whole = f"{prefix}{name}"
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield f"{whole}.*"
        elif type(child).forward is nn.Module.forward:
            yield from _layers(child, f"{whole}.")
        else:
            yield whole


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm)


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _written(rule: Split) -> str:
    heads = getattr(rule, "heads", 0)
    return f"{type(rule).__name__}({f'heads={heads}' if heads else ''})"
