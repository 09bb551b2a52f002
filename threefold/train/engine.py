"""One training step, the same for every layout: micro-batches, gradient sync, clip, update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.labels import IGNORE_INDEX
from threefold.models.layers.decoder import SampleInfo
from threefold.models.layers.router import Routing
from threefold.models.sharding import ModelPlan
from threefold.parallel.context.sequence import sum_over_shares_
from threefold.parallel.parallelism import Parallelism
from threefold.parallel.parallelize import parallelize
from threefold.parallel.parameter import is_split
from threefold.parallel.pipeline.runner import LocalBatch, LoopRunner, PipelineRunner, Runner
from threefold.parallel.pipeline.stage import Stage
from threefold.random.dropout import Dropout, sample_keys
from threefold.train.divergence import DivergenceError
from threefold.train.gradient_norm import local_squared_norm, overflow
from threefold.train.loss_scale import LossScale
from threefold.train.optimizer import Optimizer
from threefold.train.schedule import learning_rate
from threefold.train.stop import Stop

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
        loss: mean over the valid tokens of the global batch.
        grad_norm: global norm of the gradient, before it was clipped.
        lr: the learning rate of this update.
        tokens: valid tokens of the global batch, those without ignored labels.
        skipped: whether the gradient was not finite, so that no update was made.
        loss_scale: what the loss was multiplied by for the backward pass; None where it never is.
        padding: tokens that fill the global batch's samples up to their length.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False
    loss_scale: float | None = None
    padding: int = 0


class Engine:
    """A model, its gradients and its optimizer, spread over a mesh.

    Collective over the world.

    Args:
        make_model: makes the whole, single-device model.
        plan: how it is cut.
        mesh: its axes, and this rank's place on them.
        config: resolved.
        stop: sums over the ranks, in each step and evaluation, which of them ask to end the run.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        plan: ModelPlan,
        mesh: Mesh,
        config: Config,
        stop: Stop | None = None,
    ) -> None:
        self.mesh, self.config, self.plan = mesh, config, plan
        self.stop = stop or Stop()
        self.parallelism = Parallelism.of(config, plan, mesh)
        self.model = parallelize(make_model, plan, self.parallelism, config)
        self.stages, self.gradients, self.streams = self.model.stages, self.model.gradients, self.model.streams
        self.optimizer = Optimizer(
            self.model.weights, self.gradients, config.optimizer, plan, self.parallelism.sharding_axes
        )
        self.loss_scale = LossScale.of(config.precision)
        self.runner = self._make_runner()
        modules = self.model.modules()
        self._has_dropout = any(isinstance(module, Dropout) and module.p > 0 for module in modules)
        self._adds_losses = any(isinstance(module, Routing) and module.adds_losses for module in modules)
        self._padding = 0

    def _make_runner(self) -> Runner:
        train, how = self.config.train, self.parallelism
        if self.mesh.pp.size == 1:
            return LoopRunner(self.stages[0], train.gradient_accumulation_steps)
        positions = self.config.data.sequence_length // how.context.cut.shares
        activation = (train.micro_batch_size, positions, self.config.model.hidden_size)
        schedule = self.config.parallel.pipeline_schedule
        return PipelineRunner(
            self.stages, how, schedule, train.gradient_accumulation_steps, activation, self.gradients.add_
        )

    def train_step(self, batch: Batch, step: int) -> StepResult:
        """One update from a global batch.

        Args:
            batch: this replica's rows of it.
            step: 0 for the first; decides the dropout masks and the learning rate.

        Raises:
            DivergenceError: as `update` says.
            UserError: all labels are ignored.
        """
        loss, tokens = self.compute_gradients(batch, step)
        return self.update(loss, tokens, step)

    def compute_gradients(self, batch: Batch, step: int) -> tuple[Tensor, int]:
        """Fill the gradients with those of the global batch's mean loss (gradient accumulation over its micro-batches).

        Returns:
            this replica's term of the mean loss (on the last stage, zero elsewhere), and how many valid tokens the
            global batch has.
        """
        tokens, self._padding = self._count(batch)
        if tokens == 0:
            raise UserError(f"All labels of the batch of step {step + 1} are masked; check data.path.")
        keys = sample_keys(self.config.train.seed, step, batch.rows) if self._has_dropout else None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        weights = (batch.labels != IGNORE_INDEX).double() * (scale / tokens) if self._adds_losses else None
        self.gradients.begin(self.runner.arrivals)
        loss = self.runner.forward_backward(self._local_batch(batch, keys, weights), scale / tokens)
        self.gradients.finish()
        self._sum_over_tensor_ranks()
        self.model.tied.sum_({entry.name: entry.gradient for entry in self.optimizer.entries})
        if scale != 1:
            self.gradients.scale_(1 / scale)
        return loss / scale, tokens

    def update(self, local_loss: Tensor, tokens: int, step: int) -> StepResult:
        """Clip the gradients by their global norm and update the weights.

        Where there is a loss scale and loss or norm are not finite, on all ranks alike, nothing is updated and
        the scale halves.

        Args:
            local_loss, tokens: from `compute_gradients`.
            step: 0 for the first.

        Raises:
            DivergenceError: loss or norm are not finite, and no smaller loss scale could help.
        """
        loss, norm = self._loss_and_norm(local_loss)
        lr, scale = learning_rate(step + 1, self.config.optimizer), self.loss_scale
        used = None if scale is None else scale.value
        finite = isfinite(loss) and isfinite(norm)
        if not finite and (scale is None or scale.is_least):
            raise DivergenceError(
                f"Training diverged at step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; "
                f"lower optimizer.lr ({self.config.optimizer.lr:g}), to {self.config.optimizer.lr / 2:g} say."
            )
        if scale is not None:
            scale.held() if finite else scale.overflowed()
        if finite:
            limit = self.config.optimizer.clip_grad_norm
            if limit and (coefficient := limit / (norm + _CLIP_EPS)) < 1:
                self.gradients.scale_(coefficient)
            self.optimizer.step(lr)
        return StepResult(loss, norm, lr, tokens, not finite, used, self._padding)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Summed loss and number of valid tokens of a global batch; gradients and randomness stay as they are.

        As a trained model is used: experts drop no token, whatever their capacity.
        """
        local = self._local_batch(batch)
        with self.streams.preserved(), _in_evaluation_mode(self.stages):
            loss = self.runner.evaluate(local).double()
        totals = torch.stack([loss, (local.labels != IGNORE_INDEX).sum().to(loss), torch.zeros_like(loss)])
        if not (self.runner.has_loss and self.mesh.tp.is_first):
            totals.zero_()
        summed, count = self._sum_over_world(totals)
        return summed, int(count)

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float]:
        """The mean loss and the norm of the gradient."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.tp.is_first:
            totals[0] = loss
        totals[1] = local_squared_norm(self.model, self.optimizer.entries)
        if self.loss_scale is not None:
            totals[1] += overflow(self.optimizer.entries)
        mean, squared = self._sum_over_world(totals)
        return mean, squared**0.5

    def _sum_over_world(self, totals: Tensor) -> tuple[float, float]:
        """Two numbers, each summed over all ranks; in the third place of the one small collective go the requests to
        end the run."""
        totals[2] = self.stop.request()
        first, second, requests = self.mesh.world.all_reduce_(totals).tolist()
        self.stop.receive(requests)
        return first, second

    def _sum_over_tensor_ranks(self) -> None:
        """Complete the gradients of weights that every tensor rank holds whole, but used on its own positions or heads
        alone."""
        if self.mesh.tp.size == 1:
            return
        partial = [
            entry.gradient
            for entry in self.optimizer.entries
            if not is_split(entry.parameter)
            and (self.parallelism.sequence_parallel or self.plan.has_partial_gradient(entry.name))
        ]
        if partial:
            sum_over_shares_(partial, self.mesh.tp)

    def _count(self, batch: Batch) -> tuple[int, int]:
        """Valid tokens of the global batch, and its padding, from this replica's rows."""
        valid = (batch.labels != IGNORE_INDEX).sum()
        counts = torch.stack([valid, torch.zeros_like(valid) if batch.padding is None else batch.padding.sum()])
        valid, padding = self.mesh.dp.all_reduce_(counts).tolist()
        return valid, padding

    def _local_batch(self, batch: Batch, keys: Tensor | None = None, weights: Tensor | None = None) -> LocalBatch:
        """This rank's positions of every sequence, on its device."""
        device = self.mesh.device
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        cut = self.parallelism.context.cut.across_context
        if cut.shares > 1:
            held = cut.indices(tokens.shape[1] // cut.shares, device)
            tokens, labels = tokens[:, held], labels[:, held]
        facts = (
            None if fact is None else fact.to(device) for fact in (keys, batch.documents, weights, batch.positions)
        )
        return LocalBatch(tokens, labels, SampleInfo(*facts))


@contextmanager
def _in_evaluation_mode(stages: Sequence[Stage]) -> Iterator[None]:
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for stage in stages:
            stage.train()
