"""A prepared model in fp16 against `torch.autocast` with `GradScaler`, and gradients of a backward pass not its own."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import threefold as t3
from threefold.errors import UserError

STEPS = 8


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))


def data_of(rows: int, size: float) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows * STEPS, 12, generator=made)
    return x, size * x[:, :3].sum(1, keepdim=True).sin()


def plain(rows: int, size: float) -> tuple[list[float], list[float], list[Tensor]]:
    model = model_of()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for x, y in zip(*(each.split(rows) for each in data_of(rows, size)), strict=True):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales, list(model.parameters())


def prepared(rows: int, size: float) -> tuple[list[float], list[float], list[Tensor]]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(*data_of(rows, size)), batch_size=rows)
    model, optimizer, loader = t3.prepare(model, optimizer, loader, precision="fp16")
    losses, scales = [], []
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        t3.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(model.sync.loss_scale.value)
    return losses, scales, list(model.parameters())


@pytest.mark.parametrize(("rows", "size"), [(24, 2.0), (11, 4.5), (23, 6.0), (16, 30.0)])
def test_fp16_has_the_bits_of_autocast_with_a_grad_scaler(rows: int, size: float) -> None:
    """Also the skipped steps, whatever the number of rows."""
    losses, scales, weights = plain(rows, size)
    assert scales[-1] < 65536
    found, found_scales, found_weights = prepared(rows, size)
    assert found_scales == scales
    assert found == losses
    assert all(torch.equal(got, wanted) for got, wanted in zip(found_weights, weights, strict=True))


def test_rows_of_any_number_have_the_gradients_of_a_plain_backward_pass_to_the_bit() -> None:
    for rows in (3, 11, 24):
        x, y = (each[:rows] for each in data_of(rows, 1.0))
        alone, model = model_of(), model_of()
        F.mse_loss(alone(x), y).backward()
        model, loader = t3.prepare(model, DataLoader(TensorDataset(x, y), batch_size=rows))
        for own_x, own_y in loader:
            t3.backward(F.mse_loss(model(own_x), own_y))
        for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(got.grad, wanted.grad)


SENTENCE = (
    "loss.backward() was called on the loss of a prepared model, whose gradients are then not those of the global "
    "batch; call threefold.backward(loss) instead."
)


def forgotten(zero: int) -> list[str]:
    """Sentences of a loop that calls `loss.backward()` in each step, and of one that does so in between."""
    model = model_of()
    model, optimizer = t3.prepare(model, torch.optim.AdamW(model.parameters()), zero=zero)
    x, y = data_of(4, 1.0)
    told = []

    def raised(call: object) -> None:
        with pytest.raises(UserError) as caught:
            call()  # type: ignore[operator]
        told.append(str(caught.value))

    for _ in range(3):
        F.mse_loss(model(x), y).backward()
        raised(optimizer.step)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer.zero_grad()
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
        raised(lambda: t3.backward(F.mse_loss(model(x), y)))
    t3.backward(F.mse_loss(model(x), y))
    F.mse_loss(model(x), y).backward()
    raised(lambda: t3.clip_grad_norm_(model, 1.0))
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.zero_grad()  # gradients of another purpose, which are discarded
    t3.backward(F.mse_loss(model(x), y))
    optimizer.step()
    assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    return told


def test_a_forgotten_backward_is_the_same_sentence_in_every_step(pool) -> None:
    assert forgotten(0) == [SENTENCE] * 6
    assert pool.run(2, forgotten, 0) == [[SENTENCE] * 6] * 2
    assert pool.run(2, forgotten, 2) == [[SENTENCE] * 6] * 2
