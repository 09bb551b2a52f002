"""The config of a run: its sections, with a docstring for each setting.

`threefold.config.resolve` fills the settings whose default is None; their type is the one they have after that.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal, cast

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo

from threefold.config.adapter import AdapterConfig
from threefold.config.by_step import ByStep
from threefold.config.data import DataConfig
from threefold.config.model import MOST_LAYERS, ModelConfig, model_settings
from threefold.config.optimizer import OptimizerConfig
from threefold.config.preference import PreferenceConfig
from threefold.config.schedules import SCHEDULES, StageSchedule, find_schedule, schedule_name
from threefold.config.section import (
    MOST_RANKS,
    MOST_SECONDS,
    MOST_SEQUENCES,
    MOST_STEPS,
    NameIn,
    PathText,
    Section,
    derived,
)
from threefold.constants import MOST_IDS
from threefold.doors import hook
from threefold.plugins import Registry

_FAULT_POLICIES: Final = {name: f"threefold.resilience.anomalies:{name}" for name in ("stop", "skip", "rollback")}
ON_NAN: Final = Registry("train.on_nan", "threefold.fault_policies", _FAULT_POLICIES, takes_paths=True)
ON_SPIKE: Final = Registry("train.on_spike", "threefold.fault_policies", _FAULT_POLICIES, takes_paths=True)
"""Fault policies: a function in `resilience/anomalies.py` with its name above, an entry point, or an import path."""


def _callback(given: Any) -> Any:
    name = given.get("name") if isinstance(given, dict) else given
    if not isinstance(name, str) or not name:
        raise ValueError("a name, or a mapping with one")
    return given


def _address(given: str) -> str:
    return check(given) if (check := hook("address")) else given


class ParallelConfig(Section):
    """The parallel layout: a performance choice that does not change the results."""

    dp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel size: replicas among which the batch is divided."""
    tp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel size: shards of each layer."""
    ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel size: each layer's experts are divided among this many neighboring data-parallel replicas. Must
    divide `dp` and `model.num_experts`."""
    pp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Pipeline-parallel size: pipeline ranks, at most `model.num_layers`."""
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Context-parallel size: parts of each sequence. `data.sequence_length` must be a multiple of 2 · `cp`."""
    cp_method: Literal["all-gather", "ring"] = "all-gather"
    """Context-parallel attention: `all-gather` gathers all keys and values on every rank; `ring` passes them around the
    ranks block by block (ring attention), so that no rank holds all of them."""
    schedule: Annotated[PathText, BeforeValidator(schedule_name)] = Field(
        default="1f1b", examples=[*SCHEDULES, "FILE.csv", "FILE.py:NAME"]
    )
    """Pipeline schedule, the order of micro-batches. `1f1b` keeps the activations of at most `pp` micro-batches alive,
    `gpipe` those of all. `interleaved`, `looped-bfs` and `zero-bubble` give each rank `stage_chunks` stages. `zbv` and
    `dualpipev` give each rank two, so that the first and the last stage share a rank. `zero-bubble`, `zbv` and
    `dualpipev` fill the bubble with deferred weight gradients. The class names of `torch.distributed.pipelining`, such
    as `ScheduleInterleaved1F1B`, are accepted too. A CSV file of actions, or a Python function such as
    `my_file.py:schedule`, defines a schedule of your own (docs/parallel/pipeline.md)."""
    stage_chunks: int = derived(ge=1, le=MOST_LAYERS)
    """Pipeline stages of each rank. Default: 1 for `gpipe` and `1f1b`, given by a schedule of your own, else 2."""
    partition: str | Annotated[tuple[int, ...], Field(strict=False)] = "cost"
    """How layers are partitioned into pipeline stages: `cost` balances their compute, `uniform` their number,
    `uniform-chunks` their number in each of the `stage_chunks` passes through the ranks, `class:NAME` the number of one
    class, such as `class:Block`. A list gives the first layer of each stage but the first, such as `[3, 6, 9]`."""
    sequence_parallel: bool = False
    """Sequence parallelism: whether activations between the tensor-parallel layers are sharded along the sequence."""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage: data-parallel ranks shard the optimizer state (1), also the gradients (2), also the weights (3)."""
    zero_shards: int = derived(ge=1, le=MOST_RANKS)
    """For ZeRO: replicas that share one sharded copy; the others hold further copies (hybrid). Default: `dp`."""
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"
    """16-bit format for the sum of gradients over the data- and context-parallel ranks: half the bytes, at the cost of
    one rounding per rank. Gradients accumulate in fp32 before that."""

    backend: Literal["auto", "gloo"] = "auto"
    """Backend of collectives: `auto` is NCCL between GPUs and gloo between CPUs. `gloo` stages collectives of GPUs
    through the CPU, which is slow but lets several ranks share a GPU for debugging; NCCL refuses that."""

    fallbacks: tuple[str, ...] = derived(strict=False)
    """Layouts to fall back to after losing ranks, such as `["dp2,tp2", dp2]`: under torchrun, the first with exactly as
    many ranks as the world; otherwise, the first with fewer ranks than before. Each is written as for `threefold verify
    --layout`; settings among `schedule`, `stage_chunks`, `zero`, `zero_shards`, `sequence_parallel` and `cp_method`
    that it does not name take their defaults. The global batch stays the same. Default: none."""

    @cached_property
    def pipeline_schedule(self) -> StageSchedule:
        """Schedule named by `schedule`; a custom one is read on first use, which may raise a `UserError`."""
        return find_schedule(self.schedule)


class TrainConfig(Section):
    """The training loop. Batch sizes count sequences: global = micro · accumulation · `parallel.dp`."""

    max_steps: int = Field(default=1000, ge=1, le=MOST_STEPS)
    """Optimizer steps of the run. Derived from `epochs` if that is given."""
    epochs: int = derived(ge=1, le=MOST_STEPS)
    """Passes over the training samples, instead of `max_steps`. The run has enough steps to read every sample this
    often; the first samples of the next pass fill up the last step. Default: none, `max_steps` sets the length."""
    max_seconds: float = derived(gt=0, le=MOST_SECONDS)
    """Time limit of the run in seconds, from its start. The run saves a checkpoint early enough to finish in time, and
    ends as it does after SIGTERM. Default: none."""
    global_batch_size: Annotated[int, Field(ge=1, le=MOST_SEQUENCES), ByStep()] = derived()
    """Sequences in an optimizer step, over all ranks. By step, such as `{0: 256, 1000: 512}` for 512 after the first
    1000 steps, each value is a multiple of `micro_batch_size` · `parallel.dp` (docs/training.md). Default: follows from
    the other two, else 32."""
    micro_batch_size: int = derived(ge=1, le=MOST_SEQUENCES)
    """Sequences that go through the model at once on one replica. Default: follows from the other two, else the largest
    size that fits into a rank's memory, divides the replica's share and leaves a pipeline two micro-batches per stage.
    The default has at most 8192 tokens on a CPU, or 32768 on a GPU."""
    gradient_accumulation_steps: int = derived(ge=1, le=MOST_SEQUENCES)
    """Micro-batches of one replica in an optimizer step, the largest if batch sizes change. Default: follows from the
    batch sizes."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seed of the initial weights, the sample order and dropout."""
    init_from: PathText = ""
    """Run folder whose newest checkpoint provides the initial weights, such as one made by
    `threefold checkpoint import`. Default: none, weights are drawn from `seed`."""
    init_step: str | int = derived()
    """For `init_from`: the step of another checkpoint than the newest, or `best` (`checkpoint.keep_best`)."""
    init_average: bool = derived()
    """For `init_from`: whether to begin with the moving average of that run's weights (`optimizer.ema_decay`)."""
    verify: bool = True
    """For a model of your own: whether the run first compares its layout with a single process, on two steps of a few
    samples, and looks for state that checkpoints miss. Comparisons that RUN/verified.json records as equal are not
    repeated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. `auto` is CUDA if this machine has a GPU for each of its ranks, else the CPU."""
    eval_every: int = Field(default=100, ge=0, le=MOST_STEPS)
    """Steps between evaluations on the validation part; 0 for none."""
    eval_every_epochs: int = derived(ge=1, le=MOST_STEPS)
    """Epochs between evaluations, instead of `eval_every`: after the step that reads the last sample of an epoch, and
    after the last step. Default: none, `eval_every` counts steps."""
    eval_batches: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Global batches in an evaluation."""
    watch_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Silent data corruption watch: steps between comparisons of hashes of weights and optimizer state, with other
    ranks' copies and with the rank's own values after the previous update (docs/resilience.md); 0 for none."""
    watch: Literal["weights", "gradients"] = "weights"
    """For `watch_every`, the compared tensors: `weights`, which includes optimizer state; `gradients` (CPU only) adds
    the gradients, compared with those that another replica computes from the same samples."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing (recompute): the backward pass recomputes activations. `selective` recomputes those of
    the attention core; `full` recomputes whole blocks and keeps only their inputs."""
    recompute_every: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """For `recompute: full`: interval of recomputed blocks, from the first on; other blocks keep all activations."""
    loss_chunk_size: int = derived(ge=0, le=MOST_IDS)
    """Vocabulary entries whose logits a rank holds at once in training: it goes through its part of the vocabulary in
    chunks of this size, in the forward pass and, recomputing the logits, in the backward pass; 0 keeps all of them.
    Default: 0 if the fp32 logits of a micro-batch take at most 128 MiB on a rank, otherwise the size that takes that
    much. If `train.device` is cuda: 0 if they take at most 16 GiB (1 GiB in a pipeline), else the size that takes 1
    GiB."""
    exact: bool = False
    """Whether losses, gradients, weights and checkpoints have the same bits in every layout, whatever its pipeline,
    micro-batch size and number of threads (docs/exact.md). The layout's dp must divide `grain_samples`, its tp
    `grain_tensor` and its cp `grain_context`. Sample groups run one by one (`grain_leaf`), and sums that a layout
    splits are added in one fixed order."""
    grain_leaf: int = derived(ge=1, le=MOST_SEQUENCES)
    """For `exact`: samples of a sample group, which run together, whatever the micro-batch size, and share one gradient
    sum; a power of two that divides `global_batch_size` / `grain_samples`, and 1 with experts, context pieces or a
    model of your own. It determines the last bits of every result. Default: the largest that divides and has at most
    1,024 tokens, or 1."""
    grain_samples: int = derived(ge=1, le=MOST_SEQUENCES)
    """For `exact`: parts of the global batch whose gradients are summed separately; a power of two that divides
    `global_batch_size`. It determines the last bits of every result. Default: 8, or the largest power of two that
    divides."""
    grain_tensor: int = derived(ge=1, le=MOST_SEQUENCES)
    """For `exact`: number of pieces into which sums over attention heads, inner features and the vocabulary are cut; a
    power of two that divides all of these. It determines the last bits of every result. Default: 8, or the largest
    power of two that divides."""
    grain_context: int = derived(ge=1, le=MOST_SEQUENCES)
    """For `exact`: number of pieces into which sums over the positions of a sequence are cut; a power of two whose
    double divides `data.sequence_length`. It determines the last bits of every result. Default: 1, which rules out
    context parallelism; more pieces cost time in every layout."""
    compile: bool = False
    """Whether layers run through `torch.compile` in training; identical blocks are compiled once, in the first step.
    Works with every layout. Evaluation runs eagerly. So do experts, ring attention, attention with `recompute:
    selective`, and the chunked loss, between compiled parts."""
    timeout: float = Field(default=300.0, ge=0, le=MOST_SECONDS)
    """Seconds that a rank may go without progress while another rank waits for it; then the run ends with a message
    that names the rank. 0 for no limit. Everything that a rank begins or ends counts as progress, such as the forward
    pass of a micro-batch or the writing of 4 MiB of a tensor. Choose a value above the longest single operation, such
    as a callback of your own. A rank that computes all that time, as when compiling, is allowed four times as long."""
    max_restarts: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Number of times that a run on local processes restarts all its ranks after one was killed or crashed. It
    continues from the newest checkpoint, or from the newer state of `checkpoint.memory_every`. Under torchrun,
    torchrun's `--max-restarts` applies instead."""
    callbacks: tuple[Annotated[str | dict[str, Any], BeforeValidator(_callback)], ...] = derived(strict=False)
    """Training callbacks (docs/training.md) in addition to the built-in ones, in this order: names (`early_stopping`,
    `csv_log`, `epoch_metrics`, `phase_timers`, `wandb`, `mlflow`, or one of an installed package), import paths
    (`package.module:Class`, `my_callbacks.py:Class`), or mappings with arguments, such as
    `{name: early_stopping, patience: 3}`. Default: none."""

    on_nan: Annotated[str, NameIn(ON_NAN)] = "stop"
    """Action after a step whose loss or gradient norm is NaN or infinite, after the step was run again to find where
    that began (docs/resilience.md): `stop` ends the run; `skip` makes no update and continues with the next step;
    `rollback` loads the last good checkpoint, skips the steps since then, including the bad one, and continues after
    it. With `precision.dtype` `fp16`, only a step at the smallest loss scale counts. Also a function of your own that
    chooses among the three, by its import path or from an installed package (docs/developing.md)."""
    spike_factor: float = derived(gt=1)
    """A step is a spike if its loss or gradient norm exceeds this multiple of the median over the last `spike_window`
    steps with an update. Default: none, no step is a spike."""
    spike_window: int = Field(default=100, ge=2, le=10_000)
    """Steps over which the medians for `spike_factor` are taken; no step is a spike until there are that many."""
    on_spike: Annotated[str, NameIn(ON_SPIKE)] = "skip"
    """Action after a spike, as for `on_nan`."""
    max_skipped_steps: int = Field(default=100, ge=0, le=MOST_STEPS)
    """Total number of steps that `on_nan` and `on_spike` may skip in a run; one more ends it. Steps skipped by a
    rollback or by `data.skip_steps` do not count."""
    max_consecutive_skips: int = Field(default=5, ge=0, le=MOST_STEPS)
    """Consecutive steps that `on_nan` and `on_spike` may skip; one more ends the run."""
    max_rollbacks: int = Field(default=3, ge=0, le=MOST_STEPS)
    """Rollbacks that a run may make; one more ends it."""
    rollback_steps: int = derived(ge=1, le=MOST_STEPS)
    """Steps that a rollback skips, ending with the bad one; earlier steps since the checkpoint are trained again.
    Default: all since the checkpoint."""

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates at all."""
        return bool(self.eval_every or self.eval_every_epochs)


class PrecisionConfig(Section):
    """Number formats of the computation."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of the computation. `bf16` and `fp16` keep fp32 master weights and gradient sums; `fp64` is for
    CPUs."""
    loss_scale: float = Field(default=65536.0, ge=1, le=2.0**64)
    """For `fp16`: initial loss scale, a power of two; an overflowing gradient halves it and skips the update."""
    loss_scale_window: int = Field(default=1000, ge=1, le=MOST_STEPS)
    """For `fp16`: steps without overflow after which the loss scale doubles."""
    master_weights: bool = True
    """Whether weights, gradients and optimizer state are fp32 when `dtype` is narrower. With false, which needs `bf16`,
    they are bf16 too: less memory, but an update smaller than 1/256 of its weight is lost."""
    fp8: bool = False
    """Whether the linear layers of the blocks multiply in float8: faster on GPUs that have it, with numbers of 4
    significant bits. Weights, their gradients, experts and the projection to the vocabulary stay in `dtype`, `bf16` or
    `fp32`."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the computation."""
        return {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}[self.dtype]

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of weights, gradients and optimizer state in the update."""
        return max(4, self.itemsize) if self.master_weights else self.itemsize


class CheckpointConfig(Section):
    """Checkpoints under RUN/checkpoints."""

    every: int = Field(default=500, ge=0, le=MOST_STEPS)
    """Steps between checkpoints; 0 for none but the last step's, which is always saved."""
    every_seconds: float = derived(gt=0, le=MOST_SECONDS)
    """Seconds between the starts of checkpoints, in addition to `every`. Default: none, only `every` counts."""
    keep: int = Field(default=2, ge=0, le=MOST_STEPS)
    """Number of newest checkpoints that are kept; 0 for all."""
    keep_every: int = derived(ge=1, le=MOST_STEPS)
    """Steps between checkpoints kept permanently, in addition to the newest; a multiple of `every`. Default: none."""
    keep_best: Literal["valid_loss", "valid_loss_average"] = derived()
    """Whether the checkpoint with the lowest validation loss, of the weights or of their average, is kept beside the
    newest: an evaluation that is better than all before saves one. Default: none."""
    async_save: bool = derived()
    """Whether checkpoints are written in the background: a step waits only until each rank has copied its share of the
    state to host memory, which needs that much more memory. The run waits for its last checkpoint. Default: false."""
    remote: Annotated[str, AfterValidator(_address)] = derived()
    """Address to which each complete checkpoint is copied, as for `fsspec`: `s3://bucket/run`, `gs://bucket/run`,
    `file:///mnt/run`. A run resumes from there if it has newer checkpoints than RUN/checkpoints. An address belongs to
    one run, so give each run of a sweep its own. Default: none."""
    memory_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps between copies of the state in this machine's memory, from which `train.max_restarts` continues if they are
    newer than the newest checkpoint; 0 for none. Needs twice the memory of weights and optimizer state."""


class LogConfig(Section):
    """The step log."""

    every: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Steps between lines of the step log; RUN/metrics.jsonl has every step."""
    format: Literal["short", "fleet"] = "short"
    """Printed lines: `short` ones for people, or `fleet` ones as in RUN/train.log, with every measured value."""
    layers: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps between norms of each layer (gradients, updates, activations, dead units), 0 for none. In such a step a
    rank holds a second copy of its weights."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that have a value; without norms of layers, as in runs that did not know them."""
        return {name: value for name, value in super().settings().items() if name != "layers" or value}


class _YamlDumper(yaml.SafeDumper):
    """Block style for sections, one line for lists."""


_YamlDumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True))


DERIVED: Final = "  # From other settings:"
"""Line before the comments with derived settings in a config that a run stores."""


def to_yaml(sections: dict[str, dict[str, Any]]) -> str:
    """Format settings by section as YAML."""
    return yaml.dump(sections, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)


class Config(Section):
    """The config of a run. Two configs are equal if all their settings are, wherever they were read from."""

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    adapter: AdapterConfig = AdapterConfig()
    preference: PreferenceConfig = PreferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _derived: frozenset[str] = PrivateAttr(default=frozenset())

    def model_post_init(self, context: Any) -> None:
        """Keep the origins and the derived settings that `loading` passes."""
        if context is not None:
            self._origins, self._derived = context

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each setting, as `section.key`, was set, as the beginning of a sentence."""
        return self._origins

    @property
    def derived(self) -> frozenset[str]:
        """The settings, as `section.key`, that were not given and follow from others."""
        return self._derived

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return every setting that has a value, as plain YAML values by section; no section that lacks any."""
        return {name: found for name in type(self).model_fields if (found := getattr(self, name).settings())}

    def to_yaml(self) -> str:
        """Format the config as YAML that `load_config` reads back equal."""
        return to_yaml(self.sections())

    def to_yaml_as_given(self, resolved: Iterable[str] = (), kept: Iterable[str] = ()) -> str:
        """Format the config as YAML with derived settings in comments, so that reading it derives them again.

        Sections of `resolved` are stored with every setting filled, derived settings of `kept` as if given.
        """
        derived = self._derived - frozenset(kept)
        text = ""
        for name, values in self.sections().items():
            following = [key for key in values if name not in resolved and f"{name}.{key}" in derived]
            told = to_yaml({name: {key: values.pop(key) for key in following}})
            text += to_yaml({name: values})
            if following:
                text += f"{DERIVED}\n" + "".join(f"  #{line[1:]}\n" for line in told.splitlines()[1:])
        return text

    def is_given(self, key: str) -> bool:
        """Return whether a setting of an unresolved config, as `section.key`, was given."""
        section, name = key.split(".")
        return name in getattr(self, section).model_fields_set and key not in self._derived

    def given(self) -> dict[str, dict[str, Any]]:
        """Return the settings given in an unresolved config, as plain YAML values by section."""
        return {
            name: {key: value for key, value in values.items() if self.is_given(f"{name}.{key}")}
            for name, values in self.sections().items()
        }

    def origin(self, key: str) -> str:
        """Return where `section.key` was set, as the beginning of a sentence: `'run.yaml, line 3: '`, or empty."""
        return self._origins.get(key, "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.sections() == other.sections()

    __hash__ = None  # type: ignore[assignment]


def section_types() -> dict[str, type[Section]]:
    """Return the classes of a config's sections by name, in order."""
    return {name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()}


def section_settings() -> dict[str, dict[str, FieldInfo]]:
    """Return the settings of each section by name, in order; `model` has those of every family."""
    kinds = section_types()
    return {name: model_settings() if kind is ModelConfig else kind.model_fields for name, kind in kinds.items()}
