"""`threefold.explain`: run a training step with ranks that are threads of this process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.api.trainer import AnyConfig, custom_run
from threefold.comm.layout import ORDER, Layout, LayoutSpec, parse
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.model import CUSTOM
from threefold.config.presets import PRESETS
from threefold.config.schedules import find_schedule
from threefold.data.dataset import vocabulary
from threefold.data.loader import Batch, BatchSlice
from threefold.errors import UserError
from threefold.files import shown
from threefold.lesson.group import Exchange, GroupCall, Told
from threefold.lesson.lesson import Lesson, LessonEvent
from threefold.lesson.record import LessonLog, LessonMesh, RankRecord
from threefold.lesson.turns import Turns
from threefold.models.custom_batch import batch_size, map_tensors
from threefold.models.source import ModelSource
from threefold.parallel.layout_check import layout_check, made_on_meta
from threefold.parallel.parameter import offset
from threefold.random.rng import generators_preserved
from threefold.torch_private.threads import thread_groups, thread_rank
from threefold.train.step import Engine
from threefold.verify.batches import BatchSource, RandomBatches
from threefold.verify.layouts import changes, compose, prepare, shrink
from threefold.verify.reference import OneProcess

MOST_RANKS: Final = 8
_VOCABULARY: Final = 61
"""Vocabulary of a model without one, without data and without a batch; odd, so that its shards are uneven."""
_MOST_PARAMETERS: Final = 1_000_000
_NO_DATA: Final = "no-data-of-a-lesson"
_POSITIONS: Final = 8
"""Fewest positions of a sample without a batch and without a setting."""


@dataclass(frozen=True)
class _GivenBatch(BatchSource):
    """The batch of a call."""

    given: Any
    masked: bool = False
    is_nested: bool = False

    def read(self, config: Config, step: int, part: BatchSlice) -> Any:
        rows = torch.from_numpy(part.rows)
        if not self.is_nested:
            tokens, labels = self.given
            return Batch(tokens[rows].contiguous(), labels[rows].contiguous(), rows)
        return map_tensors(self.given, lambda tensor: tensor[rows])


def explain(
    model: Any,
    batch: Any = None,
    layout: str = "",
    *,
    config: AnyConfig | None = None,
    plan: Any = None,
    loss: Callable[..., Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: Literal["fp64", "fp32"] = "fp64",
    values: bool = True,
    here: int = 0,
    on_event: Callable[[LessonEvent], object] | None = None,
) -> Lesson:
    """Run one training step of a layout in this process, each rank a thread, and return its collectives in order.

    The ranks run the code of a training run; only their process group is another. One rank runs at a time, until it
    waits for others, so that a debugger stops in one rank after the other, in the same order each time.

    Args:
        model: settings of the model: a mapping of sections, a `Config`, the path of a YAML file, or the name of a
            preset; sizes of more than a million parameters are reduced, as `threefold verify` does. Or a model of your
            own as in `Trainer`: a class or function that makes it, a list of layers, or `"FILE.py:NAME"`.
        batch: the global batch: tokens int64 [samples, positions + 1], or a pair of tokens and labels of one shape; for
            a loss of your own any nesting of tensors. None for random tokens.
        layout: a layout of at most 8 ranks, such as `"dp2·tp2 zero3 sp"`, `"cp2 ring"` or
            `"pp2 gpipe accumulation4"`; empty for that of the settings.
        config: settings besides a model of your own.
        plan, loss, arguments: as in `Trainer`, of a model of your own.
        dtype: precision of weights and activations.
        values: whether events keep the tensors that ranks give and get.
        here: rank that runs in the calling thread, where `breakpoint()` works in a notebook too.
        on_event: called on its rank at each collective, before that runs.

    Raises:
        UserError: an argument is wrong, or layout, model and batch do not fit together.

    Example:
        >>> lesson = threefold.explain({"model": {"num_layers": 2, "hidden_size": 8}}, layout="tp2")
        >>> print(lesson.filter(module="blocks.0.*", rank=0))
        >>> assert lesson.difference < 1e-12
    """
    if dtype not in ("fp64", "fp32"):
        raise UserError(f"dtype is {dtype!r} but must be fp64 or fp32; use fp64.")
    if dist.is_initialized():
        raise UserError("explain runs the ranks of a lesson in one process, but this process is a rank; run it alone.")
    given, source = _run_of(model, config, plan, loss, arguments)
    if given.train.exact:
        raise UserError("train.exact is true but a lesson shows a step that is not exact; use false.")
    spec = _spec_of(given, layout)
    if not 0 <= here < spec.world_size:
        last = spec.world_size - 1
        raise UserError(f"here is {here} but the layout {spec} has ranks 0 to {last}; use {0 if here < 0 else last}.")
    resolved, rows, reduced = _resolved(given, source, spec, batch, dtype)
    with generators_preserved():
        reference = _one_process(source, resolved, rows)
        lesson = _Threads(source, resolved, rows, spec, LessonLog(values, on_event)).run(here, *reference)
    return replace(lesson, reduced=tuple(reduced))


def _run_of(model: Any, config: AnyConfig | None, plan: Any, loss: Any, arguments: Any) -> tuple[Config, ModelSource]:
    """Return the unresolved config, and the model's source."""
    is_preset = isinstance(model, str) and model in PRESETS
    is_settings = isinstance(model, Config | Mapping | Path) or (
        isinstance(model, str) and model.endswith((".yaml", ".yml"))
    )
    if is_preset or is_settings:
        for name, part in (("config", config), ("plan", plan), ("loss", loss), ("arguments", arguments)):
            if part is not None:
                raise UserError(f"{name} is given with a model of settings; it belongs to a model of your own.")
        settings = {"model": {"preset": model}} if is_preset else model
        return custom_run(_with_data(settings), None, None, None, None, None, None)
    if isinstance(model, str) and ":" not in model:
        raise UserError(
            f"model is {shown(repr(model))} but must be a preset such as {next(iter(PRESETS))!r}, the path of a YAML "
            "file, or FILE.py:NAME; `threefold config presets` lists the presets."
        )
    return custom_run(_with_data({} if config is None else config), model, plan, loss, arguments, None, None)


def _with_data(settings: Any) -> Any:
    """Return a mapping of sections with a path of data that does not exist, unless it names one."""
    if not isinstance(settings, Mapping) or not isinstance(data := settings.get("data", {}), Mapping):
        return settings
    return settings if "mixture" in data else {**settings, "data": {"path": _NO_DATA, **data}}


def _spec_of(given: Config, layout: str) -> LayoutSpec:
    """Return the layout, by default that of the config, with the number of micro-batches."""
    if layout:
        spec = parse(layout)
    else:
        sections = given.sections()
        settings = [(key, key.split(".")) for key in ORDER]
        found = {key: sections[section][name] for key, (section, name) in settings if given.is_given(key)}
        spec = LayoutSpec(Layout.from_config(given.parallel), tuple(found.items()))
    if spec.world_size > MOST_RANKS:
        raise UserError(
            f"The layout {spec} has {spec.world_size} ranks but a lesson has at most {MOST_RANKS}, as they are threads "
            "of one process; use fewer, such as dp2·tp2·pp2."
        )
    key = "train.gradient_accumulation_steps"
    if spec.setting(key) is None and spec.layout.pp == 1:
        count = given.train.gradient_accumulation_steps if given.is_given(key) else 1
        spec = replace(spec, settings=(*spec.settings, (key, count)))
    return spec


def _resolved(
    given: Config, source: ModelSource, spec: LayoutSpec, batch: Any, dtype: str
) -> tuple[Config, BatchSource, list[str]]:
    """Return the config of the step, its batch, and what was reduced."""
    has_loss = given.model.architecture == CUSTOM and source.loss(given) is not None
    found, rows = _batch_of(batch, has_loss)
    sections, layout = given.sections(), spec.layout
    largest = _VOCABULARY
    if isinstance(rows, _GivenBatch) and not rows.is_nested:
        tokens, labels = rows.given
        sections["data"]["sequence_length"] = tokens.shape[1]
        largest = 1 + int(max(tokens.max(), labels.max()))
    elif not given.is_given("data.sequence_length"):
        unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        sections["data"]["sequence_length"] = -(-_POSITIONS // unit) * unit
    if found:
        sections["train"]["global_batch_size"] = found
    elif not given.is_given("train.global_batch_size"):
        schedule = find_schedule(spec.setting("parallel.schedule", "1f1b"))
        usual = schedule.micro_batches or (2 * layout.pp if layout.pp > 1 else 1)
        sections["train"]["global_batch_size"] = layout.dp * (
            spec.setting("train.gradient_accumulation_steps") or usual
        )
    base = prepare(config_of(sections), dtype, vocabulary(given) or largest)
    reduced: list[str] = []
    if base.model.architecture != CUSTOM and _parameters(source, base) > _MOST_PARAMETERS:
        whole, base = base, shrink(base, [spec])
        reduced = changes(whole, base)
        if found:
            base = _with_batch_of(base, whole)
    if isinstance(rows, _GivenBatch) and not rows.is_nested and largest > base.model.vocab_size:
        raise UserError(
            f"The batch has the token {largest - 1} but model.vocab_size is {base.model.vocab_size}; use tokens below."
        )
    resolved = compose(base, spec)
    layout_check(source, resolved)(resolved)
    return resolved, rows, reduced


def _parameters(source: ModelSource, config: Config) -> int:
    return sum(parameter.numel() for parameter in made_on_meta(source.load(config)[0]).parameters())


def _with_batch_of(small: Config, whole: Config) -> Config:
    """Return a config with the batch of another."""
    sections = small.sections()
    for key in ("micro_batch_size", "gradient_accumulation_steps"):
        sections["train"].pop(key, None)
    sections["train"]["global_batch_size"] = whole.train.global_batch_size
    sections["data"]["sequence_length"] = whole.data.sequence_length
    sections["model"]["max_position_embeddings"] = whole.data.sequence_length
    return resolve(config_of(sections), vocab_size=1)


def _batch_of(batch: Any, has_loss: bool) -> tuple[int, BatchSource]:
    """Return the number of samples of a batch, 0 for the default, and the batch."""
    if batch is None:
        return 0, RandomBatches(masked=False)
    if has_loss:
        return batch_size(batch), _GivenBatch(batch, is_nested=True)
    if isinstance(batch, Tensor) and batch.dim() == 2 and batch.shape[1] > 1:
        batch = (batch[:, :-1], batch[:, 1:])
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not is_pair or not all(isinstance(each, Tensor) and each.dtype == torch.int64 for each in batch):
        raise UserError(
            "batch must be tokens int64 [samples, positions + 1], or a pair of tokens and labels of one shape; use "
            "torch.randint(61, (4, 9)), say."
        )
    tokens, labels = batch
    if tokens.dim() != 2 or tokens.shape != labels.shape:
        raise UserError(
            f"batch has tokens {[*tokens.shape]} and labels {[*labels.shape]} but both must be [samples, positions]; "
            "give tokens [samples, positions + 1] alone."
        )
    return len(tokens), _GivenBatch((tokens, labels))


def _one_process(source: ModelSource, config: Config, rows: BatchSource) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the plain model on the global batch."""
    make_model, plan = source.load(config)
    alone = OneProcess(make_model, plan, config, source.loss(config))
    alone.step(rows.batch(config, 0), 0)
    return alone.trace.losses[0], alone.trace.gradients[0]


class _Threads:
    """Training step of a layout with ranks in threads."""

    def __init__(
        self, source: ModelSource, config: Config, rows: BatchSource, spec: LayoutSpec, shared: LessonLog
    ) -> None:
        self.source, self.config, self.rows, self.spec, self.shared = source, config, rows, spec, shared
        size = spec.world_size
        self._records = [RankRecord(rank, shared) for rank in range(size)]
        self._store, self._turns = dist.HashStore(), Turns(size)
        self._losses: dict[int, float] = {}
        self._gradients: dict[str, Tensor] = {}

    def run(self, here: int, expected_loss: float, expected: dict[str, Tensor]) -> Lesson:
        """Run the step, and return it beside loss and gradients of one process."""
        self._gradients = {name: torch.full_like(whole, torch.nan) for name, whole in expected.items()}
        exchange = Exchange(self._turns, self._begins)
        with thread_groups(exchange.group):
            self._turns.run(self._rank, here)
        layout = self.spec.layout
        return Lesson(
            str(self.spec).removesuffix(" accumulation1"),
            self.config,
            tuple(self.shared.events),
            tuple(self.shared.passes),
            tuple(layout.coordinates(rank)._asdict() for rank in range(layout.world_size)),
            self._losses[0],
            self._gradients,
            expected_loss,
            expected,
        )

    def _begins(self, rank: int, call: GroupCall, given: Any) -> Told:
        return self._records[rank].met(call, given)

    def _rank(self, rank: int) -> None:
        record, config = self._records[rank], self.config
        with thread_rank(rank, self._turns.size, self._store), torch.enable_grad():
            mesh = LessonMesh(record, Layout.from_config(config.parallel))
            make_model, plan = self.source.load(config)
            engine = Engine(make_model, plan, mesh, config, loss=self.source.loss(config))
            if config.model.architecture == CUSTOM:
                engine.generators.begin(config.train.seed)
            batch = self.rows.batch(config, 0, mesh.dp.index, mesh.dp.size)
            record.begin(engine)
            loss, tokens = engine.compute_gradients(batch, 0)
            self._keep_gradients(engine)
            self._losses[rank] = engine.update(loss, tokens, 0).loss
            record.end()

    def _keep_gradients(self, engine: Engine) -> None:
        """Put this rank's shard of each gradient into the whole one."""
        for entry, weight in zip(engine.optimizer.entries, engine.model.trained, strict=True):
            part = self._gradients[entry.name]
            for dim, (start, length) in enumerate(zip(offset(weight.parameter), entry.gradient.shape, strict=True)):
                part = part.narrow(dim, min(start, part.shape[dim]), length)
            part.copy_(entry.gradient)
