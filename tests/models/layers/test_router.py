"""Who goes where, and what the mixture makes of it: beside every token going through every expert."""

import math
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
from threefold.models.layers.experts import MixtureOfExperts, grouped_linear
from threefold.ops.kernels import limited_gated
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
    routing = mixture(num_experts=4, expert_capacity_factor=0.5).routing
    logits = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(4))
    other = logits.clone()
    other[:, 9:] = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(5))
    assert routing(logits).experts[:, :9].equal(routing(other).experts[:, :9])
    assert (routing(logits).experts == 4).any()


def test_evaluation_mode_passes_nobody_by() -> None:
    routing = mixture(num_experts=4, expert_capacity_factor=0.25).routing.eval()
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


DEEPSEEK = {
    "num_experts": 12,
    "experts_per_token": 4,
    "router": "sigmoid",
    "router_groups": 4,
    "router_groups_chosen": 2,
}


def test_routing_by_groups_is_that_of_transformers() -> None:
    """DeepSeek-V3's mixture with a shared expert: its choice, its output and its gradients."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    moe = mixture(**DEEPSEEK, routed_scale=2.5, shared_expert_gate=False, shared_expert_ffn_hidden_size=7)
    config = modeling.DeepseekV3Config(
        hidden_size=HIDDEN, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=7
    )
    theirs = modeling.DeepseekV3MoE(config).double()
    assert config.routed_scaling_factor == 2.5
    moe.float()
    theirs.float()
    bias = torch.linspace(-0.4, 0.4, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(8))]
    moe.routing.bias.copy_(bias)
    with torch.no_grad():
        theirs.gate.e_score_correction_bias.copy_(bias)
        theirs.gate.weight.copy_(moe.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat([moe.experts.gate_up[:, 0::2], moe.experts.gate_up[:, 1::2]], 1))
        theirs.experts.down_proj.copy_(moe.experts.down)
        theirs.shared_experts.gate_proj.weight.copy_(moe.shared.gate_up.weight[0::2])
        theirs.shared_experts.up_proj.weight.copy_(moe.shared.gate_up.weight[1::2])
        theirs.shared_experts.down_proj.weight.copy_(moe.shared.down.weight)
    x = torch.randn(3, 40, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
    _, weights, experts = theirs.gate(x)
    choice = moe.routing(moe.router(x))
    order, other = choice.experts.flatten(0, 1).sort(-1), experts.sort(-1)
    assert order.values.equal(other.values)
    torch.testing.assert_close(
        choice.weights.flatten(0, 1).gather(-1, order.indices), weights.gather(-1, other.indices)
    )
    out, expected = moe(x), theirs(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), (x, moe.router.weight, moe.experts.down))
    wanted = torch.autograd.grad(expected.square().sum(), (x, theirs.gate.weight, theirs.experts.down_proj))
    for one, another in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5 * float(another.abs().max()))


def of_one_token(moe: MixtureOfExperts, logits: Tensor) -> set[int]:
    return set(moe.routing(logits.view(1, 1, -1)).experts.flatten().tolist())


def test_a_bias_chooses_and_does_not_weigh() -> None:
    moe = mixture(router="sigmoid", experts_per_token=2)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    assert of_one_token(moe, logits) == {3, 4}
    moe.routing.bias[0] = 0.5
    choice = moe.routing(logits.view(1, 1, -1))
    assert set(choice.experts.flatten().tolist()) == {0, 4}
    weights = dict(zip(choice.experts.flatten().tolist(), choice.weights.flatten().tolist(), strict=True))
    expected = logits[[0, 4]].sigmoid()
    assert weights[0] == pytest.approx(float(expected[0] / expected.sum()))


def test_a_group_is_as_good_as_its_two_best() -> None:
    """With a softmax, as in DeepSeek-V2, as its best alone."""
    logits = torch.tensor([3.0, -9.0, -9.0, 2.0, 2.0, 2.0])
    groups = {"num_experts": 6, "experts_per_token": 1, "router_groups": 2, "router_groups_chosen": 1}
    assert of_one_token(mixture(router="sigmoid", **groups), logits) <= {3, 4, 5}
    assert of_one_token(mixture(router="softmax", **groups), logits) == {0}


def test_a_softmax_of_the_chosen_is_a_normalized_softmax() -> None:
    logits = torch.randn(2, 9, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    chosen, plain = (mixture(router=router).routing(logits) for router in ("softmax_chosen", "softmax"))
    assert chosen.experts.equal(plain.experts)
    torch.testing.assert_close(chosen.weights, plain.weights)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "softmax_chosen"])
def test_the_loss_of_a_sequence_is_that_of_its_best_scores(router: str) -> None:
    """Equations 17 to 20 of arXiv 2412.19437, summed over the tokens: whatever the biases choose."""
    moe = mixture(router=router, router_sequence_loss=0.3, experts_per_token=2, router_bias_rate=0.1)
    moe.routing.bias.copy_(torch.linspace(-1, 1, EXPERTS))
    logits = torch.randn(
        2, 7, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True
    )
    weights = torch.ones(2, 7, dtype=torch.float64)
    weights[1, 3:] = 0
    choice = moe.routing(logits, SampleInfo(weights=weights))
    (found,) = torch.autograd.grad((choice.weights * 0).sum(), logits)
    loss = logits.new_zeros(())
    for b, length in ((0, 7), (1, 3)):
        scores = logits[b, :length].sigmoid() if router == "sigmoid" else logits[b, :length].softmax(-1)
        shares = scores / scores.sum(-1, keepdim=True)
        best = F.one_hot(scores.topk(2).indices, EXPERTS).sum((0, 1)).double()
        loss = loss + length * 0.3 * (best * EXPERTS / (2 * length) * shares.mean(0)).sum()
    (wanted,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_tokens_without_a_label_and_passes_without_gradients_are_not_counted() -> None:
    routing = mixture(router="sigmoid", router_bias_rate=0.1).routing
    logits = torch.randn(2, 6, EXPERTS, dtype=torch.float64, requires_grad=True)
    weights = torch.ones(2, 6)
    weights[0, 2:] = 0
    with torch.no_grad():
        routing(logits, SampleInfo(weights=weights))
    routing(logits, SampleInfo(weights=weights))  # and no backward pass
    assert routing.take_counts() is None
    choice = routing(logits, SampleInfo(weights=weights))
    choice.weights.sum().backward()
    expected = choice.experts[weights > 0].flatten().bincount(minlength=EXPERTS)
    assert routing.take_counts().equal(expected)
    assert routing.take_counts() is None
    for _ in range(3):
        routing(logits, SampleInfo(weights=weights)).weights.sum().backward()
    assert routing.take_counts().equal(3 * expected)


def test_biased_and_limited_experts_are_those_of_transformers() -> None:
    """gpt-oss's router and experts: the output and all gradients."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    settings = {"router_bias": True, "expert_bias": True, "expert_gate_limit": 0.8, "router": "softmax_chosen"}
    moe = mixture(**settings, shared_expert_gate=False, shared_expert_ffn_hidden_size=0)
    config = modeling.GptOssConfig(
        hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, intermediate_size=7
    )
    config.swiglu_limit = 0.8
    theirs = modeling.GptOssMLP(config).double()
    ours = (moe.router.weight, moe.router.bias, moe.experts.gate_up, moe.experts.down)
    ours = (*ours, moe.experts.gate_up_bias, moe.experts.down_bias)
    experts = theirs.experts
    others = (theirs.router.weight, theirs.router.bias, experts.gate_up_proj, experts.down_proj)
    others = (*others, experts.gate_up_proj_bias, experts.down_proj_bias)
    with torch.no_grad():
        for mine, other in zip(ours, others, strict=True):
            other.copy_(mine.mT if mine.dim() == 3 else mine)
    x = torch.randn(3, 9, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out, (expected, _) = moe(x), theirs(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    inner = (x.unsqueeze(2) @ moe.experts.gate_up[0].T + moe.experts.gate_up_bias[0]).abs()
    assert (inner > 0.8).any()
    assert (inner < 0.8).any()
    found = torch.autograd.grad(out.square().sum(), (x, *ours))
    wanted = torch.autograd.grad(expected.square().sum(), (x, *others))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other.mT if mine.dim() == 3 and mine is not found[0] else other)


def test_limited_gates_have_the_gradients_of_their_formula() -> None:
    pairs = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(lambda pairs: limited_gated(pairs, 0.7), (pairs,))
    assert limited_gated(torch.tensor([9.0, 9.0, -9.0, -9.0]), 2.0).tolist() == pytest.approx(
        [3 * 2 / (1 + math.exp(-1.702 * 2)), -1 * -9 / (1 + math.exp(1.702 * 9))]
    )
