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
from threefold.models.layers.decoder import SampleInfo, chunk_loss_
from threefold.models.layers.router import Routing
from threefold.models.sharding import ModelPlan
from threefold.parallel.context.sequence import sum_over_shares_
from threefold.parallel.data.compression import FORMATS
from threefold.parallel.data.grad_buckets import GradientBuckets, Gradients, JoinedGradients
from threefold.parallel.data.zero import ShardedGradients, make_sharing
from threefold.parallel.parallelize import Division, parallelize
from threefold.parallel.parameter import is_of_experts, is_split, local
from threefold.parallel.pipeline.runner import LoopRunner, PipelineRunner, Runner, Work
from threefold.parallel.pipeline.stage import Stage, whole_parameters
from threefold.parallel.pipeline.tied import TiedWeights
from threefold.parallel.recompute import recompute_
from threefold.random.dropout import Dropout, sample_keys
from threefold.random.rng import RandomStreams, lend
from threefold.train.divergence import DivergenceError
from threefold.train.division import stage_map
from threefold.train.loss_scale import LossScale
from threefold.train.optimizer import Optimizer
from threefold.train.schedule import learning_rate
from threefold.train.stop import Stop

_NORM_PIECE = 1 << 14  # elements
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
        loss: mean over the tokens of the global batch that count.
        grad_norm: global norm of the gradient, before it was clipped.
        lr: the learning rate of this update.
        tokens: tokens of the global batch that count.
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
        mesh: this rank's place.
        config: resolved.
        stop: hears in each step and evaluation what the ranks ask for.
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
        dtype = DTYPES[config.precision.dtype]
        sharing = make_sharing(mesh, config.parallel.zero, config.parallel.zero_shards)
        parallel = config.parallel
        self.division = Division(
            mesh,
            stage_map(plan, config),
            parallel.sequence_parallel,
            dtype,
            sharing,
            parallel.cp_method,
            config.precision.master_weights,
        )
        self.stages = parallelize(make_model, plan, self.division)
        recompute_(self.stages, config.train.recompute, config.train.recompute_every)
        chunk_loss_(self.stages, config.train.loss_chunk_size)
        self.streams = RandomStreams(config.train.seed, mesh.coordinates, mesh.device)
        lend(self.streams, nn.ModuleList(self.stages))
        self.tied = TiedWeights(plan, self.division.stages, mesh)
        parameters = list(whole_parameters(self.stages))
        self.gradients: Gradients
        if sharing is None:
            self.gradients = self._buckets([parameter for _, parameter in parameters])
        else:
            self.gradients = ShardedGradients(self.stages, sharing)
        axes = (mesh.tp, mesh.ep, mesh.expert_replicas, *([sharing.shards] if sharing else []))
        self.optimizer = Optimizer(parameters, self.gradients, self.division.master_dtype, config.optimizer, plan, axes)
        self.optimizer.initialise(plan, config.train.seed)
        precision = config.precision
        scaled = precision.dtype == "fp16"
        self.loss_scale = LossScale(precision.loss_scale, precision.loss_scale_window) if scaled else None
        modules = [module for stage in self.stages for module in stage.modules()]
        self._drops = any(isinstance(module, Dropout) and module.p > 0 for module in modules)
        self._adds_losses = any(isinstance(module, Routing) and module.adds_losses for module in modules)
        self._padding = 0
        if config.train.compile:
            _compile(self.stages)
        self.runner = self._make_runner()

    def _buckets(self, parameters: Sequence[Tensor]) -> Gradients:
        """Experts that replicas share are summed over those that have the same ones."""
        wire = FORMATS.get(self.config.parallel.gradient_compression)
        dtype, mesh = self.division.master_dtype, self.mesh
        experts = [local(parameter) for parameter in parameters if is_of_experts(parameter)]
        others = [local(parameter) for parameter in parameters if not is_of_experts(parameter)]
        everywhere = GradientBuckets(others, mesh.replicas, dtype, wire=wire)
        if not experts:
            return everywhere
        return JoinedGradients(
            [(others, everywhere), (experts, GradientBuckets(experts, mesh.expert_replicas, dtype, wire=wire))]
        )

    def _make_runner(self) -> Runner:
        train, division = self.config.train, self.division
        if self.mesh.pp.size == 1:
            return LoopRunner(self.stages[0], train.gradient_accumulation_steps)
        positions = self.config.data.sequence_length // division.region.cut.shares
        activation = (train.micro_batch_size, positions, self.config.model.hidden_size)
        schedule = self.config.parallel.schedule
        return PipelineRunner(
            self.stages, division, schedule, train.gradient_accumulation_steps, activation, self.gradients.add_
        )

    def train_step(self, batch: Batch, step: int) -> StepResult:
        """One update from a global batch.

        Args:
            batch: this replica's rows of it.
            step: 0 for the first; decides the dropout masks and the learning rate.

        Raises:
            DivergenceError: as `update` says.
            UserError: no token counts.
        """
        loss, tokens = self.compute_gradients(batch, step)
        return self.update(loss, tokens, step)

    def update(self, local_loss: Tensor, tokens: int, step: int) -> StepResult:
        """Clip the gradients by their global norm and update the weights.

        Where there is a loss scale and loss or norm are not finite, which all ranks see alike, nothing is updated and
        the scale halves.

        Args:
            local_loss, tokens: from `compute_gradients`.
            step: 0 for the first.

        Raises:
            DivergenceError: loss or norm are not finite, and no smaller loss scale could mend it.
        """
        loss, norm = self._loss_and_norm(local_loss)
        lr, scale = learning_rate(step + 1, self.config.optimizer), self.loss_scale
        used = None if scale is None else scale.value
        if not (isfinite(loss) and isfinite(norm)):
            if scale is None or scale.is_least:
                raise DivergenceError(
                    f"Training diverged at step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; "
                    f"lower optimizer.lr ({self.config.optimizer.lr:g}), to {self.config.optimizer.lr / 2:g} say."
                )
            scale.overflowed()
            return StepResult(loss, norm, lr, tokens, True, used, self._padding)
        if scale is not None:
            scale.held()
        limit = self.config.optimizer.clip_grad_norm
        if limit and (coefficient := limit / (norm + _CLIP_EPS)) < 1:
            self.gradients.scale_(coefficient)
        self.optimizer.step(lr)
        return StepResult(loss, norm, lr, tokens, False, used, self._padding)

    def compute_gradients(self, batch: Batch, step: int) -> tuple[Tensor, int]:
        """Fill the gradients with those of the global batch's mean loss.

        Returns:
            this replica's share of the mean loss (on the last stage, zero elsewhere), and how many tokens of the global
            batch count.
        """
        tokens, self._padding = self._count(batch)
        if tokens == 0:
            raise UserError(f"No token of the batch of step {step + 1} counts for the loss; look at data.path.")
        keys = sample_keys(self.config.train.seed, step, batch.rows) if self._drops else None
        self.gradients.begin(self.runner.arrivals)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        weights = (batch.labels != IGNORE_INDEX).double() * (scale / tokens) if self._adds_losses else None
        loss = self.runner.forward_backward(self._work(batch, keys, weights), scale / tokens)
        self.gradients.finish()
        self._sum_over_tensor_ranks()
        self.tied.sum_({entry.name: entry.gradient for entry in self.optimizer.entries})
        if scale != 1:
            self.gradients.scale_(1 / scale)
        return loss / scale, tokens

    def _sum_over_tensor_ranks(self) -> None:
        """Complete the gradients of weights that every tensor rank holds whole, but used on its own positions or heads
        alone."""
        if self.mesh.tp.size == 1:
            return
        shared = [
            entry.gradient
            for entry in self.optimizer.entries
            if not is_split(entry.parameter)
            and (self.division.sequence_parallel or self.plan.has_partial_gradient(entry.name))
        ]
        if shared:
            sum_over_shares_(shared, self.mesh.tp)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Summed loss and number of tokens that count in a global batch; gradients and randomness stay as they are.

        As a trained model is used: experts pass no token by, whatever their capacity.
        """
        work = self._work(batch)
        with self.streams.preserved(), _in_evaluation_mode(self.stages):
            loss = self.runner.evaluate(work).double()
        totals = torch.stack([loss, (work.labels != IGNORE_INDEX).sum().to(loss), torch.zeros_like(loss)])
        if not (self.runner.has_loss and self.mesh.tp.is_first):
            totals.zero_()
        totals[2] = self.stop.request()
        summed, count, requests = self.mesh.world.all_reduce_(totals).tolist()
        self.stop.hear(requests)
        return summed, int(count)

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float]:
        """The mean loss and the norm of the gradient, from one small sum over all ranks, with their requests in it."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.tp.is_first:
            totals[0] = loss
        totals[1] = self._squared_norm()
        if self.loss_scale is not None:
            totals[1] += self._overflow()
        totals[2] = self.stop.request()
        mean, squared, requests = self.mesh.world.all_reduce_(totals).tolist()
        self.stop.hear(requests)
        return mean, squared**0.5

    def _overflow(self) -> Tensor:
        """Zero, or not a number where any gradient of this rank overflowed, those that another answers for included."""
        return 0 * squared_norm([entry.gradient for entry in self.optimizer.entries])

    def _squared_norm(self) -> Tensor:
        """Sum of squares of the gradients that this rank answers for: each element of the whole model once."""
        mine = [
            entry.gradient
            for entry in self.optimizer.entries
            if self.gradients.counts(entry.leaf)
            and self.tied.owns(entry.name)
            and (is_split(entry.parameter) or self.mesh.tp.is_first)
        ]
        return squared_norm(mine) if mine else torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def _count(self, batch: Batch) -> tuple[int, int]:
        """Tokens of the global batch that count, and that are padding, from this replica's rows."""
        counted = (batch.labels != IGNORE_INDEX).sum()
        counts = torch.stack([counted, torch.zeros_like(counted) if batch.padding is None else batch.padding.sum()])
        counted, padding = self.mesh.dp.all_reduce_(counts).tolist()
        return counted, padding

    def _work(self, batch: Batch, keys: Tensor | None = None, weights: Tensor | None = None) -> Work:
        """The batch as this rank works on it: its own positions of every sequence, on its device."""
        device = self.mesh.device
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        cut = self.division.region.cut.across_context
        if cut.shares > 1:
            held = cut.indices(tokens.shape[1] // cut.shares, device)
            tokens, labels = tokens[:, held], labels[:, held]
        facts = (
            None if fact is None else fact.to(device) for fact in (keys, batch.documents, weights, batch.positions)
        )
        return Work(tokens, labels, SampleInfo(*facts))


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, in fp64.

    Torch adds the squares of a tensor up in its own dtype, which for fp32 and millions of elements loses three digits;
    by short pieces it loses none that matter, at a third of the cost of working in fp64 throughout.
    """
    pieces = [piece for tensor in tensors for piece in tensor.flatten().split(_NORM_PIECE)]
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(pieces, dtype=wide)).double().square().sum()


@contextmanager
def _in_evaluation_mode(stages: Sequence[Stage]) -> Iterator[None]:
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for stage in stages:
            stage.train()


def _compile(stages: Sequence[Stage]) -> None:
    """Have each layer but the model's first compiled at its first use.

    The first is a look-up, which gains nothing; and torch 2.13 on a CPU compiles a look-up with a keyed mask after it
    into code that reads and writes out of bounds.
    """
    torch.compiler.reset()  # nothing of an earlier engine of this process
    names = [(stage, name) for stage in stages for name in stage.layer_names if name != stage.model_plan.layers[0]]
    layers = [stage.get_submodule(name) for stage, name in names]
    # Each dropout has a stream of its own, for which its layer is compiled anew.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * len(layers))
    for layer in layers:
        layer.compile()
