"""Search space of layouts: every setting that the search may choose, its values, and the rules that layouts obey."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, Final, NamedTuple, cast, get_args

from threefold.comm.layout import Layout, LayoutSpec
from threefold.config.loading import config_of
from threefold.config.resolve import logits_chunk
from threefold.config.rules import DEFAULT_GLOBAL_BATCH_SIZE, rules
from threefold.config.schedules import SCHEDULES, find_schedule
from threefold.config.schema import Config, ParallelConfig, TrainConfig
from threefold.config.section import divisors
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.partition import stage_map

KEYS: Final = {
    "dp": "parallel.dp",
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "cp": "parallel.cp",
    "ep": "parallel.ep",
    "zero": "parallel.zero",
    "schedule": "parallel.schedule",
    "stage_chunks": "parallel.stage_chunks",
    "micro_batch_size": "train.micro_batch_size",
    "accumulation": "train.gradient_accumulation_steps",
    "recompute": "train.recompute",
    "sequence_parallel": "parallel.sequence_parallel",
}
"""Setting of each part of a `LayoutChoice`."""
FOLLOWING: Final = ("parallel.zero_shards", "parallel.fallbacks", "train.recompute_every")
"""Settings that a config gives for its layout; other layouts use their defaults."""
_DEFAULTS: Final = {
    "parallel.schedule": next(iter(SCHEDULES)),
    "parallel.zero": 0,
    "parallel.sequence_parallel": False,
    "train.recompute": "none",
}


class LayoutChoice(NamedTuple):
    """Layout, given by the settings that determine it; dp, tp, pp and cp make the number of GPUs, and ep divides dp."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero: int
    schedule: str
    stage_chunks: int
    micro_batch_size: int
    accumulation: int
    recompute: str
    sequence_parallel: bool

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def settings(self) -> dict[str, Any]:
        """Return the values of the settings that determine the layout, by `section.key`."""
        return {KEYS[name]: value for name, value in self._asdict().items()}

    @property
    def spec(self) -> LayoutSpec:
        """Layout in the notation of other commands, without the micro-batch size."""
        given = {key: value for key, value in self.settings().items() if value != _DEFAULTS.get(key, value)}
        if self.schedule in SCHEDULES and SCHEDULES[self.schedule].stages_per_rank is None:
            given["parallel.stage_chunks"] = self.stage_chunks
        return LayoutSpec(Layout(self.dp, self.tp, self.pp, self.cp, self.ep), tuple(given.items()))

    def __str__(self) -> str:
        return f"{self.spec} micro-batch {self.micro_batch_size}"


def without_layout(config: Config) -> dict[str, dict[str, Any]]:
    """Return a loaded config's given settings outside its layout, by section, with its global batch."""
    given = config.given()
    for key in (*KEYS.values(), *FOLLOWING):
        section, name = key.split(".")
        given[section].pop(name, None)
    train, batch = config.train, config.train.global_batch_size
    if not batch and train.micro_batch_size and train.gradient_accumulation_steps:
        batch = train.micro_batch_size * train.gradient_accumulation_steps * config.parallel.dp
    given["train"]["global_batch_size"] = batch or DEFAULT_GLOBAL_BATCH_SIZE
    return given


def alone(config: Config) -> Config:
    """Return a loaded config on one rank, not resolved."""
    chosen = (*KEYS.values(), *FOLLOWING)  # an error about another layout is not about a line of the config
    origins = {key: origin for key, origin in config.origins.items() if key not in chosen}
    return config_of(without_layout(config), origins=origins)


def in_layout(config: Config, choice: LayoutChoice) -> Config:
    """Return a config, resolved on one rank, in another sound layout, as `resolve` would, in a fraction of its time."""
    parallel: dict[str, Any] = {"zero_shards": choice.dp}
    train: dict[str, Any] = {}
    for key, value in choice.settings().items():
        section, name = key.split(".")
        (parallel if section == "parallel" else train)[name] = value
    if "train.loss_chunk_size" in config.derived:
        tokens = choice.micro_batch_size * -(-config.data.sequence_length // choice.cp)
        columns = -(-config.model.vocab_size // choice.tp)
        train["loss_chunk_size"] = logits_chunk(tokens, columns, config.train.device, choice.pp)
    moved = config.parallel.model_copy(update=parallel)
    moved.__dict__.pop("pipeline_schedule", None)  # cached from other settings
    return config.model_copy(update={"parallel": moved, "train": config.train.model_copy(update=train)})


Settings = Mapping[str, Any]
"""Values of settings by `section.key`."""
Check = Callable[[Config], object]
_SECTIONS: Final = frozenset(key.split(".")[0] for key in KEYS.values())
"""Config sections that hold settings of a layout."""


def layout_rules(plan: ModelPlan) -> tuple[Check, ...]:
    """Return the checks of a resolved config before its ranks start, in order; each raises a `UserError`."""
    return (*rules(), partial(stage_map, plan))


class RuleAnswers:
    """Verdicts of one rule (a check) on the layouts of a config, each computed once, and the layout settings read so
    far."""

    def __init__(self, rule: Check, config: Config) -> None:
        self._rule, self._config = rule, config
        self._tree: _Node | None = None
        self.read: set[str] = set()

    def sentence(self, settings: Settings) -> str:
        """Return why a layout, whose settings replace those of the config, breaks the rule; empty if it does not."""
        node = self._tree
        while isinstance(node, tuple):
            key, answers = node
            node = answers.get(settings[key])
        if node is not None:
            return node
        view, answer = _ConfigView(self._config, settings), ""
        try:
            self._rule(cast(Config, view))
        except UserError as error:
            answer = str(error)
        self.read |= view.read.keys()
        nodes: list[_Node] = [*((key, {}) for key in view.read), answer]
        node = self._tree = nodes[0] if self._tree is None else self._tree
        for value, following in zip(view.read.values(), nodes[1:], strict=True):  # what it reads next follows from this
            assert isinstance(node, tuple)
            node = node[1].setdefault(value, following)
        return answer


_Node = tuple[str, dict[Any, Any]] | str
"""Setting that a rule reads next, with a node for each of its values; or the rule's answer."""


class _ConfigView:
    """Config in another layout as rules see it, which records in order the layout settings that they read."""

    def __init__(self, config: Config, settings: Settings) -> None:
        self._config, self.settings = config, settings
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return _SectionView(self, name, value) if name in _SECTIONS else value


class _SectionView:
    def __init__(self, config: _ConfigView, name: str, section: Any) -> None:
        self._view, self._name, self._section = config, name, section

    def __getattr__(self, name: str) -> Any:
        key, view = f"{self._name}.{name}", self._view
        if key in view.settings:
            return view.read.setdefault(key, view.settings[key])
        derived = getattr(type(self._section), name, None)
        return derived.func(self) if isinstance(derived, cached_property) else getattr(self._section, name)


_RECOMPUTE: Final[tuple[str, ...]] = get_args(TrainConfig.model_fields["recompute"].annotation)
_MOST_ZERO: Final = next(each.le for each in ParallelConfig.model_fields["zero"].metadata if hasattr(each, "le"))


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of the mesh axes, and the `sequences` of a replica in a step."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    sequences: int

    @property
    def settings(self) -> dict[str, Any]:
        axes = {f"parallel.{axis}": getattr(self, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
        return {**axes, "parallel.zero_shards": self.dp}

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


class Space:
    """Search space of layouts for one config, resolved in any layout, whose model's plan has a number of layers.

    `fixed` settings have only one value; `schedules` are the names and files that `parallel.schedule` may have.
    """

    def __init__(
        self, config: Config, layers: int, fixed: Mapping[str, Any], schedules: Sequence[str] = tuple(SCHEDULES)
    ) -> None:
        self.config, self.layers, self.fixed, self.schedules = config, layers, fixed, schedules
        self.global_batch_size = config.train.global_batch_size
        self._micro_batches = cache(self._list_micro_batches)
        self._schedules = cache(self._list_schedules)
        self._values = cache(self._list_values)

    def meshes(self, gpus: int) -> Iterator[MeshSizes]:
        """Yield the meshes of a number of ranks whose replicas divide the global batch."""
        experts = divisors(self.config.model.num_experts) if self.config.model.num_experts else [1]
        for tp in self._allowed("parallel.tp", divisors(gpus)):
            for pp in self._allowed("parallel.pp", divisors(gpus // tp)):
                for cp in self._allowed("parallel.cp", divisors(gpus // tp // pp)):
                    dp = gpus // (tp * pp * cp)
                    if self.global_batch_size % dp or not self._allowed("parallel.dp", [dp]):
                        continue
                    for ep in self._allowed("parallel.ep", [each for each in experts if dp % each == 0]):
                        yield MeshSizes(dp, tp, pp, cp, ep, self.global_batch_size // dp)

    def options(self, mesh: MeshSizes) -> "Options":
        """Return the options of a mesh; meshes with equal values of a dim share one tuple of them."""
        levels = tuple(range(_MOST_ZERO + 1)) if mesh.dp * mesh.cp > 1 else (0,)
        return Options(
            self._micro_batches(mesh.sequences),
            self._values("parallel.sequence_parallel", (False, True) if mesh.tp > 1 else (False,)),
            self._values("train.recompute", _RECOMPUTE),
            self._schedules(mesh.pp),
            self._values("parallel.zero", levels),
        )

    def _list_micro_batches(self, sequences: int) -> tuple[Settings, ...]:
        size, count = KEYS["micro_batch_size"], KEYS["accumulation"]
        if self.config.train.exact:  # sample groups run, whatever the micro-batch size
            group = self.config.train.grain_leaf
            return ({size: group, count: max(1, sequences // group)},)
        sizes = ({size: [one], count: [sequences // one]} for one in divisors(sequences))
        return tuple(each for chosen in sizes for each in self._combined(chosen))

    def _list_schedules(self, pp: int) -> tuple[Settings, ...]:
        """List each schedule with each number of stages per rank that the layers allow."""
        found: list[Settings] = []
        for name in self.schedules if pp > 1 else self.schedules[:1]:
            stages = find_schedule(name).stages_per_rank
            chunks = range(1, max(1, self.layers // pp) + 1) if stages is None else [stages]
            found += self._combined({"parallel.schedule": [name], "parallel.stage_chunks": chunks})
        return tuple(found)

    def _list_values(self, key: str, values: tuple[object, ...]) -> tuple[Settings, ...]:
        return self._combined({key: values})

    def _combined(self, values: Mapping[str, Sequence[Any]]) -> tuple[Settings, ...]:
        """Return all combinations of the values that the fixed settings allow."""
        allowed = [self._allowed(key, each) for key, each in values.items()]
        return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*allowed))

    def _allowed(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        return [value for value in values if value == self.fixed.get(key, value)]


class Options(NamedTuple):
    """Options of a mesh in each dim, as settings."""

    micro_batch: tuple[Settings, ...]
    sequence_parallel: tuple[Settings, ...]
    recompute: tuple[Settings, ...]
    schedule: tuple[Settings, ...]
    zero: tuple[Settings, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self))

    def choice(self, mesh: MeshSizes, place: Sequence[int]) -> LayoutChoice:
        settings = dict(mesh.settings)
        for values, index in zip(self, place, strict=True):
            settings |= values[index]
        return LayoutChoice(**{name: settings[key] for name, key in KEYS.items()})
