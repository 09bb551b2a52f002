"""Multi-token prediction of one device against the formulas of DeepSeek-V3 (arXiv 2412.19437, section 2.2)."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.support.parity import DEEPSEEK, LLAMA, Case, documents_of, global_batch
from threefold.constants import IGNORE_INDEX
from threefold.models.family import make_model
from threefold.models.layers.decoder import SampleInfo

CASES = {
    "llama": replace(LLAMA, dropout=0.0),
    "one document": replace(LLAMA, dropout=0.0, documents=False),
    "tied": replace(LLAMA, dropout=0.0, tie=True),
    "deepseek": replace(DEEPSEEK, dropout=0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_has_those_of_the_further_tokens(name: str) -> None:
    case, depths, weight = CASES[name], 2, 0.7
    case = replace(case, model=(*case.model, ("mtp_layers", depths), ("mtp_loss", weight)), batch=4)
    model, plain = made(case), made(replace(case, model=CASES[name].model))
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens, labels = global_batch(case, 0)
    documents = documents_of(case, 0)
    samples = SampleInfo(documents=documents)
    total = model(tokens, labels, samples)

    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x, samples)
    x = model.head.norm(x)
    state, size, expected = (
        model.head,
        tokens.shape[1],
        F.cross_entropy((x @ model.head.output.weight.T).flatten(0, 1), labels.flatten(), reduction="sum"),
    )
    for k in range(1, depths + 1):
        depth = state.depths[k - 1]
        embedded = torch.zeros_like(x)
        wanted = torch.full_like(labels, IGNORE_INDEX)
        for row in range(len(tokens)):
            for i in range(size - k):
                if documents is None or documents[row, i] == documents[row, i + k]:
                    embedded[row, i] = model.embed.tokens.weight[tokens[row, i + k]]
                    wanted[row, i] = labels[row, i + k]
        both = torch.cat((depth.embed_norm(embedded), depth.hidden_norm(x)), -1)
        x = depth.norm(depth.block(both @ depth.join.weight.T, samples))
        logits = x @ state.output.weight.T
        mean = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        expected = expected + weight / depths * mean
    assert torch.allclose(total, expected, rtol=1e-12)

    names = [each for each, _ in model.named_parameters()]
    mine = torch.autograd.grad(total, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    for each, one, other in zip(names, mine, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), each

    model.eval()
    assert model(tokens, labels, samples) == plain.eval()(tokens, labels, samples)


def made(case: Case) -> torch.nn.Module:
    torch.manual_seed(5)
    return make_model(case.config.model).double()
