"""The `optimizer` section, and the tables of the optimizers and learning-rate schedules that it can name.

An optimizer is a class in `train/optimizers.py`, or for AdamW and Adam in `train/optim.py`, with a row of `BUILT_IN`. A
learning-rate schedule is a function in `train/optim.py` with a row of `LR_SCHEDULES`. Other packages add theirs through
entry points. docs/developing.md lists the other steps.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from threefold.config.section import MOST_STEPS, NameIn, Section, derived
from threefold.plugins import Registry, one_of


class OptimizerRow(NamedTuple):
    """Built-in optimizer."""

    implementation: str  # `module:attribute` of its `UpdateRule`
    reads: Mapping[str, Any]  # settings of `HYPER_PARAMETERS`, with their defaults (None: the section's)
    states: "Callable[[OptimizerConfig, bool], int]"  # (section, is hidden matrix) → state tensors of a weight's shape


_ADAM: Final = {"betas": None, "eps": None}

BUILT_IN: Final = {
    "adamw": OptimizerRow("threefold.train.optim:AdamW", _ADAM, lambda config, hidden: 2),
    "adam": OptimizerRow("threefold.train.optim:Adam", _ADAM, lambda config, hidden: 2),
    "sgd": OptimizerRow(
        "threefold.train.optimizers:SGD",
        {"momentum": 0.0, "nesterov": False},
        lambda config, hidden: 1 if config.momentum else 0,
    ),
    "lion": OptimizerRow("threefold.train.optimizers:Lion", {"betas": None}, lambda config, hidden: 1),
    "muon": OptimizerRow(
        "threefold.train.optimizers:Muon",
        {**_ADAM, "momentum": 0.95, "nesterov": True, "newton_schulz_steps": 5, "lr_scaling": "match_rms_adamw"},
        lambda config, hidden: 1 if hidden else 2,
    ),
}
HYPER_PARAMETERS: Final = ("betas", "eps", "momentum", "nesterov", "newton_schulz_steps", "lr_scaling")
"""Settings that only some optimizers read; all other settings of the section apply to every optimizer."""

OPTIMIZERS: Final = Registry(
    "optimizer.name",
    "threefold.optimizers",
    {name: row.implementation for name, row in BUILT_IN.items()},
    takes_paths=True,
)
_OF_A_GROUP: Final = ("match", "lr_scale", "weight_decay", "name", "arguments", *HYPER_PARAMETERS)
LR_SCHEDULES: Final = Registry(
    "optimizer.decay",
    "threefold.lr_schedules",
    {name: f"threefold.train.optim:{name}" for name in ("cosine", "linear", "constant", "wsd")},
)


class OptimizerConfig(Section):
    """The optimizer and its learning rate: linear warm-up to `lr`, then decay to `min_lr`."""

    name: Annotated[str, NameIn(OPTIMIZERS)] = "adamw"
    """Optimizer. `adam` adds weight decay to the gradient; `adamw`, `lion` and `muon` decay the weights directly.
    `muon` orthogonalizes the momentum of the weight matrices between the first and the last layer, and updates all
    other weights like `adamw`. Any other `torch.optim.Optimizer` is given by its import path, `package.module:Class` or
    `my_file.py:Class` (docs/training.md)."""
    arguments: dict[str, Any] = derived()
    """Arguments of an optimizer given by its import path, other than its parameters, `lr` and `weight_decay`, such as
    `{betas: [0.9, 0.99]}`. Default: none."""
    lr: float = Field(default=6e-4, gt=0)
    """Learning rate at the end of the warm-up: the highest, unless `min_lr` is above it."""
    min_lr: float = derived(ge=0)
    """Learning rate at the end of the decay, or of a rise if above `lr`. Default: a tenth of `lr`."""
    warmup_steps: int = derived(ge=0, le=MOST_STEPS)
    """Steps of linear warm-up from 0. Default: a tenth of `decay_steps`, at most 100."""
    decay: Annotated[str, NameIn(LR_SCHEDULES)] = "cosine"
    """Shape of the decay after the warm-up. `wsd` (warm-up, stable, decay) is linear after `stable_steps` at `lr`."""
    decay_steps: int = derived(ge=1, le=MOST_STEPS)
    """Step at which `min_lr` is reached, warm-up included. Default: `train.max_steps`."""
    stable_steps: int = derived(ge=0, le=MOST_STEPS)
    """For `wsd`: steps at `lr` between warm-up and decay. Default: until four fifths of `decay_steps`."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """For `adamw`, `adam` and `muon`: decay rates of the first and second moment. For `lion`: weight of the momentum in
    the update, and its decay rate. Each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """For `adamw`, `adam` and `muon`: term that prevents division by zero."""
    momentum: float = derived(ge=0, lt=1)
    """For `sgd` and `muon`: decay rate of the momentum. Default: 0 for `sgd`, 0.95 for `muon`."""
    nesterov: bool = derived()
    """For `sgd` and `muon`: whether to use Nesterov momentum. Default: false for `sgd`, true for `muon`."""
    newton_schulz_steps: int = derived(ge=1, le=99)
    """For `muon`: Newton–Schulz iterations per update. Default: 5."""
    lr_scaling: Literal["match_rms_adamw", "original"] = derived()
    """For `muon`: factor on `lr` for a weight matrix of A × B. `match_rms_adamw` is 0.2 · √max(A, B), so that one `lr`
    suits all weights; `original` is √max(1, A / B). Default: `match_rms_adamw`."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of the weight matrices (not biases and norms), decoupled from the gradient except for `adam` and `sgd`."""
    clip_grad_norm: float = Field(default=1.0, ge=0)
    """Limit on the global norm of the gradient; 0 for no limit."""
    frozen: list[str] = derived()
    """Patterns of parameters, or of modules with everything inside them, that keep their values, such as `[embed,
    blocks.0, "blocks.**.bias"]`: `*` is any one part of a name, `**` several. They have no gradients, optimizer state
    and fp32 copies. Default: none."""
    ema_decay: float = derived(gt=0, lt=1)
    """Decay of an exponential moving average of the weights (EMA), such as 0.999, which evaluations measure too, and
    `--average` reads from checkpoints. Default: none, there is no average."""
    ema_start: int = derived(ge=0, le=MOST_STEPS)
    """For `ema_decay`: step up to which the average equals the weights. Default: 0."""
    ema_every: int = derived(ge=1, le=MOST_STEPS)
    """For `ema_decay`: steps between updates of the average. Default: 1."""
    ema_warmup: bool = derived()
    """For `ema_decay`: whether the n-th update of the average has the decay (1 + n) / (10 + n) while that is smaller,
    so that the first weights are soon forgotten. Default: true."""
    groups: tuple[dict[str, Any], ...] = derived(strict=False, min_length=1)
    """Weights with settings of their own (docs/training.md), such as `{match: "**.bias", weight_decay: 0}` or
    `{match: "blocks.**", name: muon, lr_scale: 0.5}`: the pattern `match`, `lr_scale` (factor on the learning rate), a
    `weight_decay` for all that match, and `name`, `arguments` and other settings of an optimizer. The last group that
    matches a weight decides. Default: none."""

    @field_validator("groups")
    @classmethod
    def _require_groups(cls, groups: tuple[dict[str, Any], ...] | None) -> tuple[dict[str, Any], ...] | None:
        """Refuse a group with unknown settings, or with values that they cannot have."""
        found = []
        for number, given in enumerate(groups or (), 1):
            group = {key: value for key, value in given.items() if value is not None}
            for key in group.keys() - set(_OF_A_GROUP):
                rule = f"has {key!r} in group {number} but a group takes {one_of(key, list(_OF_A_GROUP))}"
                raise PydanticCustomError("groups", "{rule}", {"rule": rule})
            if not isinstance(group.get("match"), str) or len(group) == 1:
                example = 'such as {match: "**.bias", weight_decay: 0}'
                rule = f"has {given!r} as group {number} but must have a match and a setting for it, {example}"
                raise PydanticCustomError("groups", "{rule}", {"rule": rule})
            scale, own = group.get("lr_scale", 1.0), {key: group[key] for key in group.keys() - {"match", "lr_scale"}}
            for key, settings in (("lr_scale", {"lr": scale}), ("", own)):
                try:
                    OptimizerConfig.model_validate(settings)
                except ValidationError as error:
                    problem = error.errors()[0]
                    of = {"group": number, "key": key or problem["loc"][0], "problem": problem}
                    raise PydanticCustomError("group", "", of) from None
            found.append(group)
        return tuple(found) or None

    @property
    def parts(self) -> "tuple[OptimizerGroup, ...]":
        """The settings of weights in no group, then those of each group."""
        return OptimizerGroup("", self.model_copy(update={"groups": None})), *map(self._part, self.groups or ())

    @property
    def is_built_in(self) -> bool:
        """Whether all optimizers are this package's."""
        return all(part.config.name in BUILT_IN for part in self.parts)

    def _part(self, group: Mapping[str, Any]) -> "OptimizerGroup":
        """Fill up a group: with this section's settings, or if `name` is another, with the defaults of that."""
        own = {key: value for key, value in group.items() if key not in ("match", "lr_scale")}
        settings = {key: getattr(self, key) for key in type(self).model_fields if key != "groups"}
        name = own.get("name", self.name)
        if name != self.name:
            settings = {key: each for key, each in settings.items() if key not in ("arguments", *HYPER_PARAMETERS)}
        settings = {key: each for key, each in settings.items() if each is not None}
        config = OptimizerConfig.model_validate({**hyper_parameters(name), **settings, **own})
        return OptimizerGroup(group["match"], config, float(group.get("lr_scale", 1.0)), "weight_decay" in own)


class OptimizerGroup(NamedTuple):
    """Weights that one optimizer updates with the same settings."""

    match: str  # pattern of their names; empty for weights in no group
    config: OptimizerConfig
    lr_scale: float = 1.0
    all_decay: bool = False  # whether biases and norms decay, too


EMA: Final = {"ema_start": 0, "ema_every": 1, "ema_warmup": True}
"""Settings of the moving average, with their defaults where `ema_decay` is given."""


def hyper_parameters(name: str) -> Mapping[str, Any]:
    """Return the settings of `HYPER_PARAMETERS` that an optimizer reads, with their defaults (None: the section's)."""
    if name in BUILT_IN:
        return BUILT_IN[name].reads
    if OPTIMIZERS.is_path(name):  # importing takes time, and the class need not exist to read a checkpoint
        return {}
    return getattr(OPTIMIZERS.load(name), "reads", {})


def described_groups(groups: Any) -> str:
    """Return `optimizer.groups` as text, such as `blocks.**: name muon, lr_scale 0.5`; empty for anything else."""
    listed = [each for each in groups if isinstance(each, dict)] if isinstance(groups, list | tuple) else []
    settings = ({key: value for key, value in each.items() if key != "match"} for each in listed)
    texts = (", ".join(f"{key} {value}" for key, value in each.items()) for each in settings)
    return "; ".join(f"{each.get('match')}: {text}" for each, text in zip(listed, texts, strict=True))
