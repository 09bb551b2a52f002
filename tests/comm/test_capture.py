"""A whole step of GPT as one graph, against the same layers run one by one."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.parity import Case, global_batch
from tests.support.sweep import sweep
from threefold.comm.axis import Axis
from threefold.comm.capture import capturable, capture_step
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import SampleInfo
from threefold.parallel.context import sum_over_shares_
from threefold.parallel.leaf import local
from threefold.parallel.parallelize import Parallelism, apply_parallelism
from threefold.parallel.parameter import draw_, is_split
from threefold.parallel.pipeline.partition import StageMap
from threefold.random.dropout import sample_keys


def losses_of(case: Case, captured: bool) -> tuple[list[float], float]:
    """Losses of three steps of gradient descent, and the sum of the squares of this rank's weights after them."""
    mesh = Mesh(Layout(tp=case.tp))
    if captured:
        mesh.tp = capturable(mesh.tp)
    config, plan = case.config, gpt_plan(case.config.model, case.sequence)
    shared = config.parallel.sequence_parallel
    division = Parallelism(mesh, StageMap((0, len(plan.layers)), (0,)), shared, torch.float64)
    (stage,) = apply_parallelism(lambda: GPT(config.model), plan, division).stages
    parameters = dict(stage.named_parameters())
    for name, parameter in parameters.items():
        draw_(local(parameter).detach(), parameter, name, plan, 3)
    leaves = [local(parameter) for parameter in parameters.values()]
    whole = [place for place, parameter in enumerate(parameters.values()) if not is_split(parameter)]

    def descend_(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if shared:
            sum_over_shares_([gradients[place] for place in whole], mesh.tp)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient, alpha=0.3)

    def loss_of(tokens: Tensor, labels: Tensor, keys: Tensor) -> Tensor:
        loss: Tensor = stage(tokens, labels, SampleInfo(keys)) / labels.numel()
        return loss

    batches = [(*global_batch(case, step), sample_keys(3, step, torch.arange(case.batch))) for step in range(3)]
    if captured:
        step = capture_step(loss_of, leaves, descend_, *batches[0])
        losses = [step(*batch).item() for batch in batches]
    else:
        losses = [_eager(loss_of, leaves, descend_, batch) for batch in batches]
    return losses, sum(leaf.detach().square().sum().item() for leaf in leaves)


def _eager(loss_of, leaves, update_, batch) -> float:
    loss = loss_of(*batch)
    gradients = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        update_(leaves, gradients)
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["tp", "sequence"])
def test_gpt(pool, shared: bool) -> None:
    settings = (("parallel.sequence_parallel", True),) if shared else ()
    case = Case(tp=2, sequence=12, batch=4, layers=2, dropout=0.1, uneven=False, settings=settings)
    for (got, weights), (expected, weights_expected) in zip(
        pool.run(2, losses_of, case, True), pool.run(2, losses_of, case, False), strict=True
    ):
        assert got == pytest.approx(expected, rel=1e-12)
        assert weights == pytest.approx(weights_expected, rel=1e-12)
        assert got[2] < got[0]


def axis_operations() -> None:
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    other: Axis = capturable(axis)
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(axis.index), dtype=torch.float64)
    for dim in (0, 1, -1):
        assert other.all_gather_equal(x, dim).equal(axis.all_gather_equal(x, dim))
    torch.testing.assert_close(other.reduce_scatter(x, 1), axis.reduce_scatter(x, 1))
    torch.testing.assert_close(other.all_reduce(x), axis.all_reduce(x))
    assert other.all_reduce_max_(x.clone()).equal(axis.all_reduce_max_(x.clone()))


@sweep("ranks", [1, 2, 3], quick=(1,))
def test_operations_of_a_capturable_axis(pool, ranks: int) -> None:
    pool.run(ranks, axis_operations)


def what_cannot_be_captured() -> list[str]:
    axis = capturable(Mesh(Layout(tp=2)).tp)
    said = []
    for operation in (axis.all_gather, axis.start_all_reduce_):
        with pytest.raises(RuntimeError, match="cannot be captured") as caught:
            operation(torch.ones(2))
        said.append(str(caught.value))
    return said


def test_what_cannot_be_captured_is_refused(pool) -> None:
    first, second = pool.run(2, what_cannot_be_captured)[0]
    assert "gather_output=False" in first
    assert "all_reduce_" in second
