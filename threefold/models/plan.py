"""Sharding plans: the short form `Plan` for a custom model, completed from the model; and that of a `Decoder`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from threefold.config import Config, ModelConfig
from threefold.config.loading import problem
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.models.sharding import (
    AsConstructed,
    Constant,
    Drawn,
    Initial,
    ModelPlan,
    Normal,
    Patterns,
    Replicated,
    Split,
    Vocab,
    covers,
    matches,
)
from threefold.models.widths import deviation_factor, role_of

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Plan:
    """Sharding plan of a custom model: its layers for pipeline stages, and the rules of `shard` for the tensor axis.

    Patterns are dotted names in which `*` stands for any one part and `**` for several. If several patterns match a
    module, the most specific one applies, to the module and everything inside it.

    Args:
        layers: names or patterns of the modules that the model runs through, in order; a pattern such as `blocks.*`
            stands for its modules in the model's order. Every parameter must be in one of them.
        shard: pattern of modules, or of standalone parameters or buffers, to the rule that shards them: `Column`,
            `Row`, `Vocab`, `Replicated`, `PerHead`, `Sharded`. Norms, parameters of one element and buffers are
            `Replicated` by default. None for a model that no tensor axis shards.
        tied: pairs (user, owner) of parameters that are made one weight, with the owner's name and initial values, on
            any stages; ties that the model itself makes are detected automatically.
        costs: pattern of layers to the cost of running each, in any unit. By default the multiply-adds of its weights.
        recompute: mode of `train.recompute` to the modules that it recomputes. By default `full` recomputes the layers
            that a pattern of `layers` matches, or all layers if there is no pattern.
        initial: pattern of parameters to their initial values: `Normal(std)`, `Constant(value)` or a function that
            fills a tensor, such as `torch.nn.init.xavier_uniform_`. All others keep the values drawn by the model's
            constructor, for which each rank constructs the whole model once.

    Parameters whose `requires_grad` the model's constructor sets to False are frozen: they keep their initial values.

    Example:
        >>> import threefold as t3
        >>> plan = t3.Plan(
        ...     layers=["embed", "blocks.*", "head"],
        ...     shard={
        ...         "embed": t3.Vocab(),
        ...         "blocks.*.up": t3.Column(),
        ...         "blocks.*.down": t3.Row(),
        ...         "head.output": t3.Vocab(),
        ...     },
        ... )
    """

    layers: Sequence[str]
    shard: Mapping[str, Split] | None = None
    tied: Sequence[tuple[str, str]] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    recompute: Mapping[str, Sequence[str]] = field(default_factory=dict)
    initial: "Mapping[str, Initial | Callable[[Tensor], object]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) or not all(isinstance(each, str) for each in self.layers):
            raise UserError(f"layers is {self.layers!r} but must be a list of names, such as ['embed', 'blocks.*'].")
        for pattern, rule in (self.shard or {}).items():
            if isinstance(rule, type) and issubclass(rule, Split):
                raise UserError(f"shard has the class {rule.__name__} at {pattern!r}; write {rule.__name__}().")
            if not isinstance(rule, Split):
                raise UserError(
                    f"shard has {rule!r} at {pattern!r} but must have a rule, such as Column(), Row() or Replicated()."
                )
        for pair in self.tied:
            if isinstance(pair, str) or len(pair) != 2:
                raise UserError(f"tied has {pair!r} but must have pairs of names, (user, owner).")

    def build(self, model: "nn.Module") -> ModelPlan:
        """Return the complete plan of a model.

        Args:
            model: the unsharded model, on any device (including the meta device).

        Raises:
            UserError: a pattern matches nothing, or a parameter has no rule.
        """
        call_hook("check_model", model)
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        layers, stacked = self._expanded(modules)
        buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
        split, standalone = self._rules(modules, parameters, buffers)
        call_hook("check_patterns", "shard", split, (*modules, *parameters, *buffers), "module or parameter")
        call_hook("check_patterns", "initial", self.initial, parameters, "parameter")
        call_hook("check_patterns", "costs", self.costs, layers, "layer")
        ties = self._ties(parameters)
        return ModelPlan(
            split=split,
            standalone=standalone,
            layers=layers,
            costs=tuple(self._cost(name, modules) for name in layers),
            initial=partial(_initial_values, dict(self.initial), Patterns(self.initial)),
            ties=ties,
            recompute={"full": tuple(stacked or layers)}
            | {mode: tuple(names) for mode, names in self.recompute.items()},
            kinds=tuple(type(modules[name]).__name__ if name in modules else "" for name in layers),
            frozen=_frozen(parameters, ties),
            constructed=True,
        )

    def _expanded(self, modules: "Mapping[str, nn.Module]") -> tuple[tuple[str, ...], list[str]]:
        names: list[str] = []
        stacked: list[str] = []
        for pattern in self.layers:
            if "*" not in pattern:
                names.append(pattern)
                continue
            found = [name for name in modules if name and matches(name, pattern)]
            if not found:
                raise UserError(f"layers has {pattern!r}, which no module of the model has for a name.")
            names += found
            stacked += found
        return tuple(names), stacked

    def _rules(
        self, modules: "Mapping[str, nn.Module]", parameters: "Mapping[str, nn.Parameter]", buffers: Sequence[str]
    ) -> tuple[dict[str, Split], dict[str, Split]]:
        """Return the rules of modules, and of standalone parameters and buffers."""
        shard = self.shard
        if shard is None:
            shard = {each.split(".")[0]: Replicated() for each in parameters if "." in each}
        split: dict[str, Split] = {}
        standalone: dict[str, Split] = {}
        for pattern, rule in shard.items():
            named = any(name and matches(name, pattern) for name in modules)
            if named or not any(matches(name, pattern) for name in (*parameters, *buffers)):
                split[pattern] = rule
            else:
                standalone[pattern] = rule
        given, given_standalone = Patterns(split), Patterns(standalone)
        left: list[str] = []
        for name, parameter in parameters.items():
            owner = name.rpartition(".")[0]
            if given.deciding(owner) is not None or given_standalone.naming(name) is not None:
                continue
            if owner and is_norm(modules[owner]):
                split[owner] = Replicated()
            elif parameter.numel() == 1:
                standalone[name] = Replicated()
            else:
                left.append(name)
        decided = Patterns(split)  # a norm decides on the modules inside it too
        left = [name for name in left if decided.deciding(name.rpartition(".")[0]) is None]
        call_hook("check_undecided", left, split, modules)
        return split, standalone

    def _cost(self, layer: str, modules: "Mapping[str, nn.Module]") -> float:
        """Return the given cost, or the multiply-adds per token, as far as the layer's weights determine them."""
        from torch import nn

        for pattern, cost in self.costs.items():
            if matches(layer, pattern):
                return float(cost)
        total = 0.0
        for module in modules[layer].modules() if layer in modules else ():
            size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            # A look-up costs a multiply-add for 16 parameters, for its gradient and memory traffic.
            total += size / 16 if isinstance(module, nn.Embedding) else size
        return total

    def _ties(self, parameters: "Mapping[str, nn.Parameter]") -> dict[str, str]:
        """Map each further name of a parameter to the name that it is stored under."""
        check_tied(parameters, self.tied)
        ties = {
            name: owner
            for user, owner in self.tied
            for name, parameter in parameters.items()
            if parameter is parameters[user] and name != owner
        }
        owners = {parameters[owner]: owner for owner in ties.values()}
        for name, parameter in parameters.items():
            owner = owners.setdefault(parameter, name)
            if owner != name:
                ties.setdefault(name, owner)
        return ties


def check_tied(parameters: "Mapping[str, nn.Parameter]", tied: Iterable[tuple[str, str]]) -> None:
    """Raise a `UserError` unless each pair (user, owner) names parameters of a model that have one shape."""
    for user, owner in tied:
        for name in (user, owner):
            if name not in parameters:
                raise UserError(
                    f"tied names {name!r}, which is not a parameter of the model{nearest(name, parameters)}."
                )
        if parameters[user].shape != parameters[owner].shape:
            raise UserError(
                f"tied has {user!r} of the shape {[*parameters[user].shape]} and {owner!r} of "
                f"{[*parameters[owner].shape]}, which cannot be one; tie parameters of one shape."
            )


def tie_(model: "nn.Module", ties: Mapping[str, str]) -> "nn.Module":
    """Make each user in `ties` (user → owner) the owner's parameter, in place; return the model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    check_tied(parameters, ties.items())
    for user, owner in ties.items():
        module, _, attribute = user.rpartition(".")
        setattr(model.get_submodule(module), attribute, parameters[owner])
    return model


def tying(make_model: "Callable[[], nn.Module]", plan: ModelPlan) -> "Callable[[], nn.Module]":
    """Return a function that makes a model with the ties of its plan, whether or not its constructor makes them."""
    return partial(_make_tied, make_model, plan.ties) if plan.ties else make_model


def _make_tied(make_model: "Callable[[], nn.Module]", ties: Mapping[str, str]) -> "nn.Module":
    return tie_(make_model(), ties)


def _initial_values(
    rules: "Mapping[str, Initial | Callable[[Tensor], object]]", patterns: Patterns, name: str
) -> Initial:
    pattern = patterns.naming(name)
    rule = AsConstructed() if pattern is None else rules[pattern]
    return rule if isinstance(rule, Initial) else Drawn(rule)


def is_norm(module: "nn.Module") -> bool:
    """Return whether a module is one of torch's norms that every rank can compute identically."""
    from torch import nn

    return isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm)


def _frozen(parameters: "Mapping[str, nn.Parameter]", ties: Mapping[str, str]) -> frozenset[str]:
    """Return the untrained parameters; raise UserError if all are, or if only some names of a tied weight are."""
    frozen = frozenset(name for name, parameter in parameters.items() if not parameter.requires_grad)
    if parameters and len(frozen) == len(parameters):
        raise UserError("All parameters of the model are frozen (requires_grad is False); leave one to be trained.")
    for user, owner in ties.items():
        if user in parameters and owner in parameters and (user in frozen) != (owner in frozen):
            one, other = (user, owner) if user in frozen else (owner, user)
            raise UserError(
                f"{one!r} is frozen (requires_grad is False) and {other!r}, which is tied to it, is trained; freeze "
                "both or none."
            )
    return frozen


def freeze(plan: ModelPlan, model: "nn.Module", config: Config) -> ModelPlan:
    """Return the plan with the parameters of `optimizer.frozen` frozen too; `model` is unsharded, on any device.

    Raises:
        UserError: a pattern matches nothing, no parameter is left to be trained, or only some names of a weight are
            frozen.
    """
    patterns, key = config.optimizer.frozen or (), "optimizer.frozen"
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not all(pattern.split(".")) or any("**" in part and part != "**" for part in pattern.split(".")):
            rule = f"{pattern!r} must be a name in which a part may be * or **, such as 'blocks.0' or 'blocks.**.bias'"
            raise problem(config, key, rule)
        if not any(covers(pattern, name) for name in names):
            near = nearest(pattern, [name for name, _ in model.named_modules()] + names)
            raise problem(config, key, f"no parameter or module of the model has a name like {pattern!r}{near}")
    moved = [name for name, _ in model.named_buffers() if plan.initializes_buffer(name)]  # expert biases
    chosen = (name for name in (*names, *moved) if any(covers(pattern, name) for pattern in patterns))
    all_frozen = plan.frozen.union(chosen)
    for name in names:
        owner = plan.whole_name(name)
        if (name in all_frozen) != (owner in all_frozen):
            one, other = (name, owner) if name in all_frozen else (owner, name)
            rule = f"{other!r} shares the weight of {one!r} and would be trained; add {other!r}, or leave both out"
            raise problem(config, key, rule)
    if all_frozen.issuperset(names):
        raise problem(config, key, "that leaves no parameter to train; leave one out")
    return replace(plan, frozen=all_frozen)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the nearest of the known names; empty if none is near."""
    close = get_close_matches(name, [each for each in known if each], n=1)
    return f"; the nearest is {close[0]!r}" if close else ""


def decoder_plan(config: ModelConfig, split: Mapping[str, Split], block_costs: Sequence[int]) -> ModelPlan:
    """Return the plan of a `Decoder`, given the rules of its weights and each block's multiply-adds per token."""
    layers, table = config.num_layers, config.vocab_size * config.hidden_size
    ties = {"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {}
    terms: dict[str, float] = {}
    head = table
    recompute: dict[str, tuple[str, ...]] = {"selective": ("blocks.*.attn.core",), "full": ("blocks.*",)}
    if depths := config.mtp_layers:
        head += depths * (table + 2 * config.hidden_size**2 + block_costs[-1])
        split = {**split, "head.tokens": Vocab(), "head.depths.*": Replicated(), **_further_split(config, split)}
        ties["head.tokens.weight"] = "embed.tokens.weight"
        terms = {"next": 1.0} | {f"mtp_{depth + 1}": config.mtp_loss / depths for depth in range(depths)}
        for mode, (pattern,) in recompute.items():
            recompute[mode] = (pattern, pattern.replace("blocks.*", "head.depths.*.block"))
    # A lookup has no multiply-adds, but its gradient and memory traffic are not free.
    costs = (table / 16, *block_costs, head)
    return ModelPlan(
        split=split,
        layers=("embed", *(f"blocks.{number}" for number in range(layers)), "head"),
        costs=tuple(float(cost) for cost in costs),
        initial=lambda name: initial_values(name, config),
        kinds=("Input", *["Block"] * layers, "Head"),
        ties=ties,
        recompute=recompute,
        terms=terms,
        width=config.width,
    )


def _further_split(config: ModelConfig, split: Mapping[str, Split]) -> dict[str, Split]:
    """Return the rules of the blocks of multi-token prediction, each like the last block."""
    mixture = config.has_experts(config.num_layers - 1)
    dense = ("blocks.*.mlp.gate_up", "blocks.*.mlp.down")
    found = {
        pattern: rule
        for pattern, rule in split.items()
        if pattern.startswith("blocks.*.")
        and (not pattern.startswith("blocks.*.mlp.") or mixture == (pattern not in dense))
    }
    return {
        pattern.replace("blocks.*", f"head.depths.{depth}.block", 1): rule
        for depth in range(config.mtp_layers)
        for pattern, rule in found.items()
    }


def initial_values(name: str, config: ModelConfig) -> Initial:
    """Return the initial values of a weight, as in GPT-2.

    They are N(0, range²), times 1/√(2·layers) if the output joins the residual stream; biases are 0, norms 1
    (0 with `norm_offset`). µP scales the standard deviation with the width.
    """
    if name.endswith((".bias", "_bias")):
        return Constant(0.0)
    if fnmatchcase(name, "*norm.weight"):
        return Constant(0.0 if config.norm_offset else 1.0)
    joining = ("*.attn.proj.weight", "*.mlp.down.weight", "*.mlp.shared.down.weight", "*.mlp.experts.down")
    joins_residual = any(fnmatchcase(name, pattern) for pattern in joining)
    deviation = config.initializer_range * deviation_factor(role_of(name), config.width)
    return Normal(deviation * ((2 * config.num_layers) ** -0.5 if joins_residual else 1.0))
