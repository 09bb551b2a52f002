"""An engine's state as named global tensors, and a run's checkpoints made of it."""

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, TOKENIZER, Checkpoint, complete, model_files
from threefold.checkpoint.manifest import AnomalyFacts, Facts, read_manifest
from threefold.checkpoint.resume import consumed_by
from threefold.checkpoint.save import prune_checkpoints, save_checkpoint, set_aside_checkpoint
from threefold.checkpoint.tensor_names import MODEL, OPTIMIZER
from threefold.checkpoint.tensors import load_tensors, stored_names
from threefold.checkpoint.writer import WRITER, record_of
from threefold.config import Config
from threefold.data.chat.chat_template import CONFIG_FILE
from threefold.data.content_checksums import Content
from threefold.data.dataset import Dataset
from threefold.data.samples import ConsumedSamples
from threefold.errors import UserError
from threefold.files import read_text
from threefold.huggingface.sidecar_files import PREFIX, carried_by
from threefold.models.source import file_source
from threefold.random.rng import STREAMS, stored_as
from threefold.torch_private.tensors import foreach_norm
from threefold.train.engine import Engine


def model_tensors(engine: Engine) -> dict[str, Tensor]:
    """Master weights under their names in the unsplit model, sharing memory."""
    return {MODEL + entry.name: entry.stored(entry.master.detach()) for entry in engine.optimizer.entries}


def engine_tensors(engine: Engine) -> dict[str, Tensor]:
    """Master weights and optimizer state under their names in the unsplit model, sharing memory.

    Tied embeddings on two stages have the same name and value on both, so they are stored once.
    """
    tensors = model_tensors(engine)
    for name, state, value in engine.optimizer.stored_states():
        tensors[f"{OPTIMIZER}{name}.{state}"] = value
    return tensors


class Checkpoints:
    """Saves and resumes a run. Collective over the world.

    Args:
        run_dir: the run's folder.
        engine: whose state it is.
        config: resolved.
        dataset: training data, with its tokenizer if it has one.
        contents: returns the checksums of each of its corpora.
        anomalies: returns what the run has done about bad steps.

    Attributes:
        consumed: the training samples consumed before each step, from where the run starts on.
    """

    def __init__(
        self,
        run_dir: Path,
        engine: Engine,
        config: Config,
        dataset: Dataset,
        contents: Callable[[], tuple[Content, ...]] = tuple,
        anomalies: Callable[[], AnomalyFacts | None] = lambda: None,
    ) -> None:
        self.run_dir, self.engine, self.config, self.dataset = run_dir, engine, config, dataset
        self.contents, self.anomalies = contents, anomalies
        self.consumed = ConsumedSamples(config.train.global_batch_size)
        self._passed: frozenset[Path] = frozenset()
        self._sizes = dataset.sizes()
        self._texts: dict[str, str] = {}
        if engine.mesh.world.is_first:
            # Model and data with every setting resolved, as the weights depend on them; the rest as it was given.
            self._texts = {CONFIG: config.to_yaml_as_given(("model", "data"), kept=("train.max_steps",))}
            if config.model.file:
                files = model_files(file_source(config.model).path)
                self._texts |= {name: read_text(file) for name, file in files.items()}
            if dataset.tokenizer_file is not None:
                self._texts[TOKENIZER] = dataset.tokenizer_file.read_text(encoding="utf-8")
            if dataset.template is not None:
                self._texts |= {PREFIX + name: text for name, text in dataset.template.files().items()}

    def save(self, step: int) -> Path:
        """Save a checkpoint after `step` updates, and return its folder.

        Raises:
            UserError: on every rank, when it cannot be written.
        """
        tensors = engine_tensors(self.engine)
        if self.engine.streams.used:
            tensors |= self.engine.streams.stored(self.engine.mesh.layout.shape)
        texts = self._texts | {WRITER: record_of(self.config.parallel).text}
        path = save_checkpoint(self.run_dir, self._facts(step), tensors, texts, self.engine.mesh.world)
        self._passed -= {path}  # it replaced a damaged one
        return path

    def prune(self, step: int) -> None:
        """Delete all but the newest `checkpoint.keep` up to that of `step`.

        Raises:
            UserError: on every rank, when one cannot be deleted.
        """
        prune_checkpoints(self.run_dir, self.config.checkpoint.keep, step, self.engine.mesh.world, self._passed)

    def whole(self) -> list[Path]:
        """Folders of the complete checkpoints, oldest first."""
        return [checkpoint.path for checkpoint in complete(self.run_dir)]

    def set_aside(self, step: int) -> tuple[Path, Path] | None:
        """As `set_aside_checkpoint`."""
        return set_aside_checkpoint(self.run_dir, step, self.engine.mesh.world)

    def is_finite(self) -> bool:
        """Whether weights and optimizer state are finite on every rank."""
        optimizer = self.engine.optimizer
        tensors = [entry.master.detach() for entry in optimizer.entries]
        tensors += [value for _, _, value in optimizer.states()]
        filled = [tensor for tensor in tensors if tensor.numel()]
        largest = torch.stack([norm.double().to(self.engine.mesh.device) for norm in foreach_norm(filled, torch.inf)])
        bad = (~largest.isfinite()).sum()
        return int(self.engine.mesh.world.all_reduce_(bad)) == 0

    def restore(self, checkpoint: Checkpoint, passed: Collection[Path] = ()) -> int:
        """Load a checkpoint into the engine, and return the number of updates it was saved after.

        Args:
            checkpoint: to read.
            passed: folders of newer, damaged checkpoints, which do not count as kept.

        Raises:
            DamagedCheckpoint: on every rank, when a checksum differs; the engine's state is undefined then.
            UserError: on every rank, when it cannot be read.
        """
        self._passed = frozenset(passed)
        load_tensors(engine_tensors(self.engine), checkpoint.path)
        self.engine.optimizer.restored()
        facts, scale = checkpoint.facts, self.engine.loss_scale
        self.consumed = consumed_by(checkpoint, self.config)
        if scale is not None and facts.loss_scale is not None:
            scale.value, scale.good_steps = facts.loss_scale, facts.good_steps
        self._restore_streams(checkpoint)
        self._carry(checkpoint)
        return checkpoint.step

    def load(self, path: Path) -> Facts:
        """Load one of the run's checkpoints into the engine, and return its facts.

        Raises:
            UserError: on every rank, when it is damaged or cannot be read.
        """
        try:
            checkpoint = Checkpoint(path, read_manifest(path).facts)
            self.restore(checkpoint, self._passed)
        except DamagedCheckpoint as damage:
            raise UserError(
                f"The run cannot go back to {path}, which is damaged ({damage.reason}); remove it and use --resume."
            ) from None
        return checkpoint.facts

    def start_from(self, checkpoint: Checkpoint) -> None:
        """Warm start: load the weights of another run's checkpoint; each rank reads only its own shards.

        Raises:
            DamagedCheckpoint: on every rank, when a checksum differs; the engine's state is undefined then.
            UserError: on every rank, when it cannot be read.
        """
        load_tensors(model_tensors(self.engine), checkpoint.path)
        self.engine.optimizer.restored()
        self._carry(checkpoint)

    def _carry(self, checkpoint: Checkpoint) -> None:
        """Copy the sidecar files of a checkpoint into the following ones."""
        if self.engine.mesh.world.is_first:
            carried = carried_by(checkpoint.path)
            settings = {name: text for name, text in carried.items() if name == PREFIX + CONFIG_FILE}
            # The data's tokenizer.json, where there is one, is the same; the checkpoint has more settings of it.
            self._texts = carried | self._texts | settings

    def _restore_streams(self, checkpoint: Checkpoint) -> None:
        """Restore this rank's random streams; in another layout, reseed them from the seed and the step."""
        streams, layout = self.engine.streams, self.engine.mesh.layout
        names = stored_names(checkpoint.path)
        if any(name.startswith(stored_as(layout.shape)) for name in names):
            mine = {name: state for name, state in streams.stored(layout.shape).items() if name in names}
            load_tensors(mine, checkpoint.path)
            if mine:  # else this rank's stage never drew
                streams.load_stored(mine, layout.shape)
        elif any(name.startswith(STREAMS) for name in names):
            streams.reseed("after", checkpoint.step)

    def _facts(self, step: int) -> Facts:
        dataset, train, scale = self.dataset, self.config.train, self.engine.loss_scale
        return Facts(
            step=step,
            consumed_samples=self.consumed.before(step),
            seed=train.seed,
            eod=dataset.eod,
            tokenizer_sha256=dataset.tokenizer_sha256,
            tokens=sum(tokens for tokens, _ in self._sizes),
            documents=sum(documents for _, documents in self._sizes),
            corpora=self._sizes,
            special_tokens=None if dataset.rule.is_assumed else dataset.rule.special_tokens,
            beginning=dataset.rule.beginning,
            contents=self.contents(),
            loss_scale=scale.value if scale else None,
            good_steps=scale.good_steps if scale else 0,
            anomalies=self.anomalies(),
        )
