"""The config of a run: its sections, with a docstring for each setting.

Settings that default to None are filled by `threefold.config.resolve`, so that their type is the one they have in a
resolved config; everything after resolving may rely on it.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from threefold.config.data import DataConfig
from threefold.config.model import MOST_LAYERS, ModelConfig, model_settings
from threefold.config.optimizer import OptimizerConfig
from threefold.config.schedules import SCHEDULES, Schedule, find_schedule, schedule_name
from threefold.config.section import (
    MOST_IDS,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_SEQUENCES,
    MOST_STEPS,
    AddressText,
    PathText,
    Section,
    derived,
)


def _schedule_name(given: Any) -> str:
    try:
        return schedule_name(str(given))
    except ValueError as error:
        raise PydanticCustomError("schedule", "{rule}", {"rule": str(error)}) from None


ScheduleName = Annotated[PathText, BeforeValidator(_schedule_name)]
"""A pipeline schedule of the table in `threefold.config.schedules`, or the path of a CSV file of actions."""


def _callback(given: Any) -> Any:
    name = given.get("name") if isinstance(given, dict) else given
    if not isinstance(name, str) or not name:
        raise PydanticCustomError("callback", "a name, or a mapping with one")
    return given


CallbackEntry = Annotated[str | dict[str, Any], BeforeValidator(_callback)]
"""A training callback: its name or import path, or a mapping of that as `name` and of arguments."""


class ParallelConfig(Section):
    """The layout of the ranks: a performance choice that changes no result."""

    dp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel replicas; the batch is divided among them."""
    tp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel shards of each layer."""
    ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel parts of the experts of each layer, shared among as many neighbouring data-parallel replicas; a
    divisor of `dp` and of `model.num_experts`."""
    pp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Pipeline ranks; at most `model.num_layers`."""
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Context-parallel parts of each sequence; `data.sequence_length` is a multiple of 2 · `cp`."""
    cp_method: Literal["all-gather", "ring"] = "all-gather"
    """Context-parallel attention: `all-gather` gathers all keys and values on every rank, `ring` passes them around the
    ranks block by block (ring attention), so that no rank holds all."""
    schedule: ScheduleName = Field(default="1f1b", examples=[*SCHEDULES, "FILE.csv"])
    """Pipeline schedule, the order of the micro-batches: `1f1b` keeps the activations of at most `pp` of them alive,
    `gpipe` of all of them. `interleaved`, `looped-bfs` and `zero-bubble` give each rank `stage_chunks` stages; `zbv`
    and `dualpipev` give it two, the first and the last on one rank. `zero-bubble`, `zbv` and `dualpipev` fill the
    bubble with deferred weight gradients. The classes of `torch.distributed.pipelining` are other names of these, such
    as `ScheduleInterleaved1F1B`; a CSV file of actions is a schedule of your own (docs/parallel/pipeline.md)."""
    stage_chunks: int = derived(ge=1, le=MOST_LAYERS)
    """Pipeline stages of each rank. Default: 1 for `gpipe` and `1f1b`, those of a CSV file, else 2."""
    partition: str | Annotated[tuple[int, ...], Field(strict=False)] = "cost"
    """How layers are partitioned into pipeline stages: `cost` balances what they compute, `uniform` their number,
    `uniform-chunks` their number in each of the `stage_chunks` passes through the ranks, `class:NAME` those of one
    class, such as `class:Block`; or the stage split points, the first layers of the stages after the first, such as
    `[3, 6, 9]`."""
    sequence_parallel: bool = False
    """Sequence parallelism: whether activations between the tensor-parallel layers are sharded along the sequence."""
    zero: int = Field(default=0, ge=0, le=3)
    """What the data-parallel ranks share instead of holding it whole: 1 the optimizer's state, 2 the gradients too, 3
    the weights too."""
    zero_shards: int = derived(ge=1, le=MOST_RANKS)
    """Data-parallel replicas that share one copy where `zero` is not 0; the others hold further copies. Default: `dp`,
    one copy."""
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"
    """What gradients are rounded to while they are summed over the data- and context-parallel ranks: half the bytes,
    for sums that are off by as many roundings as there are ranks. Before that they are added up in fp32."""

    backend: Literal["auto", "gloo"] = "auto"
    """What collectives go through: `auto` takes NCCL between GPUs and gloo between CPUs; `gloo` has them of a GPU too
    go through the CPU, which is slow and for debugging: several ranks may then share a GPU, as NCCL refuses."""

    fallbacks: tuple[str, ...] = derived(strict=False)
    """Layouts with which a run that has lost ranks goes on, such as `[dp2·tp2, dp2]`: the first that fits, under
    torchrun one of as many ranks as the world has, otherwise one of fewer than before. Each is written as for
    `threefold verify --layout`; what it does not name of `schedule`, `stage_chunks`, `zero`, `zero_shards`,
    `sequence_parallel` and `cp_method` has its default. The global batch stays. Default: none."""

    @cached_property
    def pipeline_schedule(self) -> Schedule:
        """The schedule that `schedule` names; a file is read once, when it is first used.

        Raises:
            UserError: the file cannot be read or its actions break a rule.
        """
        return find_schedule(self.schedule)


class TrainConfig(Section):
    """The training loop. Batch sizes count sequences: global = micro · accumulation · `parallel.dp`."""

    max_steps: int = Field(default=1000, ge=1, le=MOST_STEPS)
    """Optimizer steps of the run. Where `epochs` is given, they follow from it."""
    epochs: int = derived(ge=1, le=MOST_STEPS)
    """Passes over the training samples, in place of `max_steps`: as many steps as read each sample so often, the last
    step being filled up with the first samples of the next pass. Default: none, `max_steps` says how long the run
    is."""
    max_seconds: float = derived(gt=0, le=MOST_SECONDS)
    """Seconds after which the run ends, from its start: it saves a checkpoint early enough to be done by then, and ends
    as after SIGTERM. Default: none."""
    global_batch_size: int = derived(ge=1, le=MOST_SEQUENCES)
    """Sequences in an optimizer step, over all ranks. Default: follows from the other two, else 32."""
    micro_batch_size: int = derived(ge=1, le=MOST_SEQUENCES)
    """Sequences that go through the network at once on one replica. Default: follows from the other two, else the
    largest size that fits into a rank's memory, divides the replica's share and leaves a pipeline two micro-batches per
    stage; of at most 8192 tokens on a CPU, 32768 on a GPU."""
    gradient_accumulation_steps: int = derived(ge=1, le=MOST_SEQUENCES)
    """Micro-batches of one replica in an optimizer step. Default: follows from the batch sizes."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seed of the initial weights, the order of the samples and dropout."""
    init_from: PathText = ""
    """Folder of a run whose newest checkpoint has the initial weights, such as one that `threefold checkpoint import`
    made. Default: none, they are drawn from `seed`."""
    verify: bool = True
    """For an own model: whether a run compares its layout with one process before its first step, on two steps of a few
    samples, and looks for state that no checkpoint has. What was found equal, by RUN/verified.json, is not compared
    again."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute; `auto` takes CUDA when this machine has a GPU for each of its ranks, else the CPU."""
    eval_every: int = Field(default=100, ge=0, le=MOST_STEPS)
    """Steps between evaluations on the validation part; 0 for none."""
    eval_every_epochs: int = derived(ge=1, le=MOST_STEPS)
    """Epochs between evaluations, in place of `eval_every`: after the step that reads the last sample of an epoch, and
    after the last step. Default: none, `eval_every` counts steps."""
    eval_batches: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Global batches in an evaluation."""
    watch_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Silent corruption watch: steps between comparisons of hashes of weights and optimizer state, with those of the
    ranks that hold copies and with what the rank held after the update before (docs/training.md); 0 for none."""
    watch: Literal["weights", "gradients"] = "weights"
    """With `watch_every`, what is compared: `weights`, which includes optimizer state; or with `gradients` these too,
    with those that another replica computes of the same samples, on a CPU."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing (recompute): the backward pass computes activations again, with `selective` those of the
    attention core, with `full` those of whole blocks, of which only the inputs are kept."""
    recompute_every: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """With `recompute: full`, every so many-th block is computed again, from the first on; the others keep all."""
    loss_chunk_size: int = derived(ge=0, le=MOST_IDS)
    """Entries of the vocabulary whose logits a rank has in memory at once while it trains: it goes over its part of the
    vocabulary in such chunks, forward and, computing the logits again, backward; 0 for all at once. Default: 0 where
    the fp32 logits of a micro-batch take at most 128 MiB on a rank, else as many as take that."""
    compile: bool = False
    """Whether the layers run through `torch.compile` in training: blocks that are alike are compiled once, in the first
    step. Goes with every layout. Evaluation runs layers as they are written; so do, between compiled parts, experts,
    ring attention, attention with `recompute: selective`, and the loss in chunks."""
    timeout: float = Field(default=300.0, ge=0, le=MOST_SECONDS)
    """Seconds that a rank may make no progress while another one waits for it, before the run ends with a message that
    names it; 0 for any number. Everything that a rank begins or ends is progress, such as the forward pass of a
    micro-batch or the writing of 4 MiB of a tensor, so that the longest of these decides, such as a callback of your
    own. A rank that computes all the while, as a compilation in the first step does, has four times as long."""
    max_restarts: int = Field(default=0, ge=0, le=MOST_STEPS)
    """How often a run on local processes starts all its ranks again after one was killed or crashed: from the newest
    checkpoint, or the newer state of `checkpoint.memory_every`. Under torchrun its `--max-restarts` counts instead."""
    callbacks: tuple[CallbackEntry, ...] = derived(strict=False)
    """Training callbacks (docs/training.md), which the run gets beside the built-in ones, in this order: each a name
    (`early_stopping`, `csv_log`, `epoch_metrics`, `phase_timers`, `wandb`, `mlflow`, or one of an installed package) or
    an import path (`package.module:Class`, `my_callbacks.py:Class`), or with arguments a mapping such as
    `{name: early_stopping, patience: 3}`. Default: none."""

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a step whose loss or gradient norm is NaN or infinite, after it was run again to find where that
    began (docs/training.md): `stop` ends the run; `skip` makes no update in that step and goes on with the next;
    `rollback` loads the last good checkpoint, skips the steps since then, the bad one included, and goes on after
    it. With `precision.dtype` `fp16`, only a step at the smallest loss scale counts."""
    spike_factor: float = derived(gt=1)
    """A step is a spike where its loss or gradient norm is more than so many times the median of the last
    `spike_window` steps with an update. Default: none, no step is a spike."""
    spike_window: int = Field(default=100, ge=2, le=10_000)
    """Steps over which the medians for `spike_factor` are taken; before there are as many, no step is a spike."""
    on_spike: Literal["stop", "skip", "rollback"] = "skip"
    """What follows a spike, as for `on_nan`."""
    max_skipped_steps: int = Field(default=100, ge=0, le=MOST_STEPS)
    """Steps that `on_nan` and `on_spike` may skip in a run, all in all; one more ends it. Those of a rollback and of
    `data.skip_steps` do not count."""
    max_consecutive_skips: int = Field(default=5, ge=0, le=MOST_STEPS)
    """Steps in a row that `on_nan` and `on_spike` may skip; one more ends the run."""
    max_rollbacks: int = Field(default=3, ge=0, le=MOST_STEPS)
    """Rollbacks that a run may make; one more ends it."""
    rollback_steps: int = derived(ge=1, le=MOST_STEPS)
    """Steps that a rollback skips, the bad one and those before it; those between the checkpoint and them are made
    again. Default: all since the checkpoint."""

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations."""
        return bool(self.eval_every or self.eval_every_epochs)


_ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


class PrecisionConfig(Section):
    """Number formats of the computation."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of the computation; `bf16` and `fp16` keep fp32 master weights and add gradients up in fp32, `fp64` is
    for the CPU."""
    loss_scale: float = Field(default=65536.0, ge=1, le=2.0**64)
    """For `fp16` alone: what the loss is multiplied by at first, a power of two. It halves when the gradient overflows,
    and that step makes no update."""
    loss_scale_window: int = Field(default=1000, ge=1, le=MOST_STEPS)
    """For `fp16` alone: steps without overflow after which the loss scale doubles."""
    master_weights: bool = True
    """Whether weights, gradients and optimizer states are fp32 where `dtype` is narrower. With false, which needs
    `bf16`, they are bf16 too: less memory, but an update below a 256th of its weight is lost."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element that is computed with."""
        return _ITEMSIZES[self.dtype]

    @property
    def master_itemsize(self) -> int:
        """Bytes of an element of what is updated: weights, their gradients and optimizer states."""
        return max(4, self.itemsize) if self.master_weights else self.itemsize


class CheckpointConfig(Section):
    """Checkpoints under RUN/checkpoints."""

    every: int = Field(default=500, ge=0, le=MOST_STEPS)
    """Steps between checkpoints; the last step always has one; 0 for the last alone."""
    every_seconds: float = derived(gt=0, le=MOST_SECONDS)
    """Seconds after which a checkpoint is saved, from the beginning of the one before it, beside those of `every`.
    Default: none, `every` alone says when."""
    keep: int = Field(default=2, ge=0, le=MOST_STEPS)
    """How many of the newest checkpoints are kept; 0 for all."""
    keep_every: int = derived(ge=1, le=MOST_STEPS)
    """Steps between checkpoints that are kept for good beside the newest: those of its multiples, of which it must be
    one of `every`. Default: none."""
    async_save: bool = derived()
    """Whether checkpoints are written in the background: a step waits only until each rank has copied its share of the
    state into host memory, which takes that much more memory. The last checkpoint of a run is waited for. Default:
    false."""
    remote: AddressText = derived()
    """Address that each complete checkpoint is copied to, as `fsspec` has them: `s3://bucket/run`, `gs://bucket/run`,
    `file:///mnt/run`. A run resumes from there where it has newer ones than RUN/checkpoints. Default: none."""
    memory_every: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps between copies of the state in this machine's memory, from which `train.max_restarts` goes on where they
    are newer than the newest checkpoint; 0 for none. They take twice the memory of weights and optimizer state."""


class LogConfig(Section):
    """The step log."""

    every: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Steps between lines of the step log; RUN/metrics.jsonl has every step."""


class _YamlDumper(yaml.SafeDumper):
    """Block style for sections, one line for lists."""


_YamlDumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True))


def to_yaml(sections: dict[str, dict[str, Any]]) -> str:
    """Settings by section as YAML."""
    return yaml.dump(sections, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)


class Config(Section):
    """A whole run. Two configs are equal when all their settings are, wherever they were read from."""

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _derived: frozenset[str] = PrivateAttr(default=frozenset())

    def model_post_init(self, context: Any) -> None:
        """Keep the origins and the derived settings that `made` passes."""
        if context is not None:
            self._origins, self._derived = context

    @classmethod
    def made(
        cls, sections: Mapping[str, Any], origins: Mapping[str, str] | None = None, derived: Iterable[str] = ()
    ) -> Self:
        """Make a config of its sections.

        Args:
            sections: settings or sections, by the name of the section.
            origins: where settings, as `section.key`, were set, as the beginning of a sentence.
            derived: settings, as `section.key`, that follow from others.

        Raises:
            pydantic.ValidationError: unknown key, wrong type or impossible value.
        """
        return cls.model_validate(dict(sections), context=(origins or {}, frozenset(derived)))

    def noted(self, origins: Mapping[str, str], derived: Iterable[str]) -> Self:
        """Return the same settings with other origins and other derived settings."""
        return self.made({name: getattr(self, name) for name in type(self).model_fields}, origins, derived)

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each setting, as `section.key`, was set, as the beginning of a sentence."""
        return self._origins

    @property
    def derived(self) -> frozenset[str]:
        """The settings, as `section.key`, that were not given and follow from others."""
        return self._derived

    def sections(self) -> dict[str, dict[str, Any]]:
        """Every setting that has a value, as plain YAML values by section."""
        return {name: getattr(self, name).settings() for name in type(self).model_fields}

    def to_yaml(self) -> str:
        """The config as YAML that `load_config` reads back equal."""
        return to_yaml(self.sections())

    def to_yaml_as_given(self, resolved: Iterable[str] = (), kept: Iterable[str] = ()) -> str:
        """The same, with derived settings in comments, so that they are derived again when the file is read.

        Args:
            resolved: sections that are stored with every setting filled.
            kept: settings, as `section.key`, that are stored as if they had been given.
        """
        derived = self._derived - frozenset(kept)
        text = ""
        for name, values in self.sections().items():
            following = [key for key in values if name not in resolved and f"{name}.{key}" in derived]
            told = to_yaml({name: {key: values.pop(key) for key in following}})
            text += to_yaml({name: values})
            if following:
                text += "  # From other settings:\n" + "".join(f"  #{line[1:]}\n" for line in told.splitlines()[1:])
        return text

    def compact(self) -> str:
        """The same on one line a section, for the console."""
        rows = ({name: values} for name, values in self.sections().items())
        lines = (yaml.safe_dump(row, default_flow_style=True, width=10_000, sort_keys=False) for row in rows)
        return "".join(f"{line.strip()[1:-1]}\n" for line in lines)

    def is_given(self, key: str) -> bool:
        """Whether a setting, as `section.key`, was given; of a config that is not resolved."""
        section, name = key.split(".")
        return name in getattr(self, section).model_fields_set and key not in self._derived

    def given(self) -> dict[str, dict[str, Any]]:
        """The settings that were given, as plain YAML values by section; of a config that is not resolved."""
        return {
            name: {key: value for key, value in values.items() if self.is_given(f"{name}.{key}")}
            for name, values in self.sections().items()
        }

    def origin(self, key: str) -> str:
        """Where `section.key` was set, as the beginning of a sentence: `'run.yaml, line 3: '`, or nothing."""
        return self._origins.get(key, "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.sections() == other.sections()

    __hash__ = None  # type: ignore[assignment]


def section_types() -> dict[str, type[Section]]:
    """The sections of a config by name, in order."""
    return {name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()}


def section_settings() -> dict[str, dict[str, FieldInfo]]:
    """The settings of each section by name, in order; of `model` those of every family."""
    kinds = section_types()
    return {name: model_settings() if kind is ModelConfig else kind.model_fields for name, kind in kinds.items()}
