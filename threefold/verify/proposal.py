"""Proposal of a plan for a model that has none, from the classes and names of its modules."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from threefold.models.plan import Plan, is_norm
from threefold.models.sharding import Column, Patterns, Replicated, Row, Sharded, Split, Vocab


def as_pattern(name: str) -> str:
    """Return a name with its numbers replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a `forward`; otherwise its layers are called one by one."""
    return type(module).forward is not nn.Module.forward


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ATTENTION: Final = _words("q k v query key value q_proj k_proj v_proj to_q to_k to_v wq wk wv")
"""Last parts of the names of linear layers that compute queries, keys and values."""
_COLUMN: Final = _ATTENTION | _words(
    "gate up gate_proj up_proj fc1 c_fc fc_in w1 w3 linear1 intermediate dense_h_to_4h"
)
"""Last parts of the names of linear layers to shard by output features; the next layer takes the shard."""
_ROW: Final = _words(
    "o out proj o_proj out_proj to_out wo down down_proj fc2 c_proj fc_out w2 linear2 dense dense_4h_to_h"
)
"""Last parts of the names of linear layers that take the shard."""
_FUSED: Final = _words("qkv c_attn query_key_value wqkv in_proj qkv_proj to_qkv")
_LOGITS: Final = _words("head lm_head output logits unembed decoder to_logits")


@dataclass(frozen=True)
class Proposal:
    """A plan that the modules' names suggest.

    `undecided` says why some modules or parameters (by pattern) could not be decided; they are replicated.
    """

    plan: Plan
    undecided: Mapping[str, str] = field(default_factory=dict)

    def label(self, name: str) -> str:
        """Return the key of a module or standalone parameter in the plan: its name, or a pattern."""
        return name if name in (self.plan.shard or {}) else as_pattern(name)

    def rule(self, name: str) -> Split:
        """Return the rule of a parameter; parameters without one are replicated."""
        rules = self.plan.shard or {}
        label = Patterns(rules).naming(name) or Patterns(rules).deciding(name.rpartition(".")[0])
        return rules[label] if label is not None else Replicated()

    def source(self) -> str:
        """Return the plan as Python code, to be pasted into the model's file."""
        layers = ", ".join(f'"{name}"' for name in self.plan.layers)
        lines = ["plan = t3.Plan(", f"    layers=[{layers}],", "    shard={"]
        for pattern, rule in (self.plan.shard or {}).items():
            why = self.undecided.get(pattern)
            lines.append(f'        "{pattern}": t3.{_written(rule)},{f"  # undecided: {why}" if why else ""}')
        return "\n".join([*lines, "    },", ")"])


def propose(model: nn.Module) -> Proposal:
    """Propose a plan for an unsharded model, on any device."""
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    decided: dict[str, tuple[Split, str]] = {}
    opaque = tuple(_opaque(model))
    for name, module in model.named_modules():
        if name.startswith(opaque):
            continue
        if isinstance(module, nn.Linear):
            decided[name] = _of_linear(name, module, model, vocabularies)
        elif isinstance(module, nn.Embedding):
            positions = name.rpartition(".")[2].startswith(("pos", "wpe"))
            decided[name] = (Replicated() if positions else Vocab()), ""
        elif is_of_torch(module) and name:
            if not is_norm(module) and any(True for _ in module.parameters(recurse=False)):
                decided[name] = Replicated(), ""  # a convolution, an LSTM, …: no rule shards these
        else:
            for last, parameter in module.named_parameters(recurse=False):
                if parameter.numel() > 1:
                    decided[f"{name}.{last}" if name else last] = _of_standalone(module, tuple(parameter.shape))
    # Names that differ only in their numbers become a pattern, if all have the same rule.
    named = Counter(as_pattern(name) for name, _ in model.named_modules())
    same: dict[str, list[str]] = {}
    for name in decided:
        same.setdefault(as_pattern(name), []).append(name)
    rules: dict[str, Split] = {}
    undecided: dict[str, str] = {}
    for pattern, names in same.items():
        rule, why = decided[names[0]]
        alike = all(decided[name] == decided[names[0]] for name in names)
        alone = named[pattern] in (0, len(names)) or isinstance(rule, Replicated)
        for label in [pattern] if alike and alone else names:
            rules[label], why = decided.get(label, (rule, why))
            if why:
                undecided[label] = why
    return Proposal(Plan(list(_layers(model)), rules), undecided)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, so that its parameters belong together."""
    return type(module).__module__.startswith("torch.")


def _opaque(model: nn.Module) -> Iterator[str]:
    """Yield prefixes of names in torch modules that use these weights themselves, such as `nn.MultiheadAttention`."""
    for name, module in model.named_modules():
        if name and is_of_torch(module) and any(True for _ in module.parameters(recurse=False)):
            yield name + "."


def _of_standalone(module: nn.Module, shape: tuple[int, ...]) -> tuple[Split, str]:
    """Return the rule of a standalone parameter: cut along a dim that counts heads or features of a layer beside it."""
    linear = {name: each for name, each in module.named_children() if isinstance(each, nn.Linear)}
    columns = {name: each for name, each in linear.items() if name in _COLUMN and linear.keys() & _ROW}
    heads = _heads(module)
    if (columns.keys() & _ATTENTION or _cuts_fused(module)) and heads and shape.count(heads) == 1:
        return Sharded(shape.index(heads), heads), ""
    cut = {each.out_features for each in columns.values()}
    whole = {each.out_features for name, each in linear.items() if name in _ROW}
    dims = [dim for dim, size in enumerate(shape) if size in cut - whole]
    if len(dims) == 1:
        return Sharded(dims[0]), ""
    return Replicated(), "a standalone parameter; replicated is right unless a cut layer's output meets it"


def _heads(module: nn.Module) -> int:
    names = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
    return next((count for each in names if isinstance(count := getattr(module, each, None), int)), 0)


def _cuts_fused(module: nn.Module) -> bool:
    """Return whether a module has one layer for equally wide queries, keys and values, and a known number of heads."""
    heads = _heads(module)
    linear = (each for name, each in module.named_children() if name in _FUSED and isinstance(each, nn.Linear))
    fused = next(linear, None)
    if fused is None or not heads:
        return False
    return fused.out_features == 3 * fused.in_features and fused.in_features % heads == 0


def _of_linear(name: str, module: nn.Linear, model: nn.Module, vocabularies: set[int]) -> tuple[Split, str]:
    """Return the rule of a linear layer, with the reason if it is undecided."""
    owner, _, last = name.rpartition(".")
    parent = model.get_submodule(owner)
    beside = {child for child, each in parent.named_children() if isinstance(each, nn.Linear)}
    if module.out_features in vocabularies and (last in _LOGITS or not owner):
        return Vocab(), ""
    heads, cuts_fused = _heads(parent), _cuts_fused(parent)
    if last in _FUSED and cuts_fused and beside & _ROW:
        why = "right if all queries come first, then keys, then values; without groups if by head"
        return Column(heads=heads, groups=3), why
    if last in _FUSED:
        why = "queries, keys and values in one layer; Column(heads=…, groups=3) if it is all queries first"
        return Replicated(), why
    if last in _COLUMN and beside & _ROW:
        fits = last in _ATTENTION and heads > 0 and module.out_features % heads == 0
        return Column(heads=heads if fits else 0), ""
    if last in _ROW and (beside & _COLUMN or cuts_fused):
        fits = (bool(beside & _ATTENTION) or cuts_fused) and heads > 0 and module.in_features % heads == 0
        return Row(heads=heads if fits else 0), ""
    if last in _COLUMN or last in _ROW:
        return Replicated(), f"no {'Row' if last in _COLUMN else 'Column'} beside it that it could go with"
    if module.out_features in vocabularies:
        return Vocab(), ""
    return Replicated(), "its name says nothing"


def _layers(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the modules that a model seems to run through: its children, and patterns for the lists among them."""
    for name, child in model.named_children():
        whole = f"{prefix}{name}"
        if not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield f"{whole}.*"
        elif has_forward(child):
            yield whole
        else:
            yield from _layers(child, f"{whole}.")


def _written(rule: Split) -> str:
    heads, groups, dim = (getattr(rule, name, None) for name in ("heads", "groups", "dim"))
    parts = ["" if dim is None else str(dim), f"heads={heads}" if heads else ""]
    parts.append(f"groups={groups}" if groups and groups > 1 else "")
    return f"{type(rule).__name__}({', '.join(filter(None, parts))})"
