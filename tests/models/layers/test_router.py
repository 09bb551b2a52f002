"""Who goes where, and what the mixture makes of it: beside every token going through every expert."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.parity import Case, make_engine, over, shard_of
from threefold.comm.mesh import Event
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.models.layers.decoder import SampleInfo
from threefold.models.layers.experts import MixtureOfExperts, Routing, grouped_linear
from threefold.verify.worker_pool import WorkerPool

HIDDEN, EXPERTS, PER_TOKEN = 10, 5, 2


def mixture(**settings: object) -> MixtureOfExperts:
    model = {
        "architecture": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": 5,
        "num_experts": EXPERTS,
        "experts_per_token": PER_TOKEN,
        "expert_ffn_hidden_size": 7,
        "shared_expert_ffn_hidden_size": 3,
        "shared_expert_gate": True,
        **settings,
    }
    config = resolve(Config.model_validate({"model": model, "data": {"path": "x"}}), 11)
    moe = MixtureOfExperts(config.model).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return moe


def dense_gate(moe: MixtureOfExperts, x: Tensor, weights: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """Every token through every expert, a gate of zeros and weights after it; and the auxiliary losses, in words."""
    routing = moe.routing
    logits = x @ moe.router.weight.T
    probabilities = logits.softmax(-1)
    gate = torch.zeros_like(probabilities)
    wanted = torch.zeros_like(probabilities)
    for b in range(x.shape[0]):
        taken = [0] * EXPERTS
        for s in range(x.shape[1]):
            best = sorted(range(EXPERTS), key=lambda e: -float(probabilities[b, s, e].detach()))[:PER_TOKEN]
            total = sum(probabilities[b, s, e] for e in best) if routing.normalize else 1.0
            for e in best:
                wanted[b, s, e] = 1
                taken[e] += 1
                if capacity is None or taken[e] <= capacity:
                    gate = gate.index_put(
                        (torch.tensor(b), torch.tensor(s), torch.tensor(e)), probabilities[b, s, e] / total
                    )
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        inner = x @ moe.experts.gate_up[e].T
        out = out + gate[..., e : e + 1] * ((F.silu(inner[..., 0::2]) * inner[..., 1::2]) @ moe.experts.down[e].T)
    inner = x @ moe.shared.gate_up.weight.T
    shared = (F.silu(inner[..., 0::2]) * inner[..., 1::2]) @ moe.shared.down.weight.T
    out = out + (x @ moe.shared_gate.weight.T).sigmoid() * shared
    loss = x.new_zeros(())
    for b in range(x.shape[0]):
        counted = weights[b] > 0
        share = wanted[b, counted].mean(0) / PER_TOKEN
        for s in range(x.shape[1]):
            balance = EXPERTS * (share * probabilities[b, s]).sum()
            stray = logits[b, s].logsumexp(-1) ** 2
            loss = loss + weights[b, s] * (routing.aux_loss * balance + routing.z_loss * stray)
    return out, loss


def gradients(loss: Tensor, moe: MixtureOfExperts, x: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(moe.named_parameters())}
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize(
    ("settings", "capacity"),
    [
        ({}, None),
        ({"normalize_expert_weights": False}, None),
        ({"expert_capacity_factor": 0.75}, 3),
        ({"router_aux_loss": 0.3, "router_z_loss": 0.2, "expert_capacity_factor": 1.0}, 4),
    ],
    ids=["dropless", "weights-as-they-are", "drops", "losses"],
)
@pytest.mark.parametrize("starved", [False, True], ids=["all-used", "one-starved"])
def test_a_mixture_is_its_dense_gate(settings: dict[str, object], capacity: int | None, starved: bool) -> None:
    moe = mixture(**settings)
    x = torch.randn(3, 9, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if starved:  # the third expert gets no token
        x[..., 0] = x[..., 0].abs() + 1
        with torch.no_grad():
            moe.router.weight[2] = 0
            moe.router.weight[2, 0] = -50
    x.requires_grad_()
    weights = torch.rand(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights[0, 4:] = 0
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    out = moe(x, SampleInfo(weights=weights))
    expected, losses = dense_gate(moe, x, weights, capacity)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    got = gradients((out * direction).sum(), moe, x)
    wanted = gradients((expected * direction).sum() + losses, moe, x)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    assert not starved or not got["experts.down"][2].any()


def test_what_comes_later_takes_no_place() -> None:
    """A sequence cut short is routed as its beginning was, as far as the capacity is the same."""
    routing = Routing(4, 2, 0.5, True, 0, 0)
    logits = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(4))
    other = logits.clone()
    other[:, 9:] = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(5))
    assert routing(logits).experts[:, :9].equal(routing(other).experts[:, :9])
    assert (routing(logits).experts == 4).any()


def test_evaluation_mode_passes_nobody_by() -> None:
    routing = Routing(4, 2, 0.25, True, 0, 0).eval()
    assert (routing(torch.randn(2, 16, 4)).experts < 4).all()


def trained_and_evaluated(case: Case) -> tuple[float, float, float]:
    """The first batch's loss in training, and its sum in evaluations before and after that."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    before, _ = engine.evaluate(batch)
    loss, _ = engine.compute_gradients(batch, 0)
    after, _ = engine.evaluate(batch)
    return engine.mesh.world.all_reduce(loss).item(), before, after


def test_the_held_out_loss_passes_nobody_by(pool: WorkerPool) -> None:
    """As `threefold eval` of the checkpoint; training continues with its capacity afterwards."""
    scarce = over(2, 1, 1, ep=2, dropout=0.0, model=(*over(1, 1, 1).model, ("expert_capacity_factor", 0.3)))
    ample = replace(scarce, model=(*scarce.model, ("expert_capacity_factor", 0.0)))
    (loss, *evaluations), *_ = pool.run(2, trained_and_evaluated, scarce)
    (dropless, *expected), *_ = pool.run(2, trained_and_evaluated, ample)
    assert evaluations == expected
    assert loss != pytest.approx(dropless, rel=1e-6)


def test_no_losses_without_weights() -> None:
    """As in evaluation: the gradient is that of the output alone."""
    plain, losing = mixture(), mixture(router_aux_loss=1.0, router_z_loss=1.0)
    x = torch.randn(1, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    for name, gradient in gradients(plain(x).sum(), plain, x).items():
        assert gradient.equal(gradients(losing(x).sum(), losing, x)[name]), name


def test_grouped_linear_is_one_layer_a_group() -> None:
    counts = torch.tensor([3, 0, 5])
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, counts), (x, weight))
    expected = torch.cat([part @ matrix.T for part, matrix in zip(x.split(counts.tolist()), weight, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, counts), expected)


def test_grouped_linear_is_torchs_grouped_product() -> None:
    """What a GPU takes instead, as far as a CPU has it."""
    counts = torch.tensor([3, 0, 5])
    x, weight = torch.randn(8, 16), torch.randn(3, 12, 16)
    offsets = counts.cumsum(0).to(torch.int32)
    torch.testing.assert_close(grouped_linear(x, weight, counts), F.grouped_mm(x, weight.mT, offs=offsets))


def traffic(case: Case) -> tuple[list[Event], int]:
    engine = make_engine(case)
    with engine.mesh.recorder.recording() as events:
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    return [event for event in events if event.operation == "all_to_all"], engine.mesh.ep.size


def test_bytes_of_the_all_to_all(pool: WorkerPool) -> None:
    """Each token once for each of its experts: there and back, and so do the gradients."""
    sizes = tuple(item for item in over(1, 1, 1).model if item[0] != "expert_capacity_factor")
    case = over(2, 1, 1, ep=2, model=sizes)
    (first, _), (second, _) = pool.run(2, traffic, case)
    layers, passes = case.layers - 1, 4
    assert len(first) == layers * passes * case.accumulation
    tokens = case.batch * case.sequence  # of both ranks: what one sends more than it gets, the other gets more
    row = case.heads * case.head_dim * 8
    assert sum(event.nbytes for event in (*first, *second)) == layers * passes * tokens * 2 * row
    assert {event.axis for event in first} == {"ep"}
