"""Comparison of training pairs: what the ranks report, gradients that never arrive, and values that are not finite."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity_support import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import threefold_parity as parity
from threefold_parity.compare import Findings, compare
from threefold_parity.departure import LOSS, NORM
from threefold_parity.placement import Piece
from threefold_parity.record import GRADIENT, OUTPUT_GRADIENT, Record
from threefold_parity.rows import Padding
from threefold_parity.verdict import Judgement, judge

WIDTH, HEADS, SIZE, WORDS = 12, 4, 5, 23


class CopyTo(torch.autograd.Function):
    """Identity, whose gradient is summed over ranks: the input of a column-parallel layer."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed


class ReduceFrom(torch.autograd.Function):
    """Sum over ranks, whose gradient is the identity: the output of a row-parallel layer."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Attention(nn.Module):
    """Multi-query attention, whose query heads tensor-parallel ranks share; each has the key and the value head."""

    def __init__(self, ranks: int, is_detached: bool) -> None:
        super().__init__()
        self.ranks, self.is_detached, self.heads = ranks, is_detached, HEADS // ranks
        self.q, self.k, self.v = (nn.Linear(WIDTH, count * SIZE) for count in (self.heads, 1, 1))
        self.out = nn.Linear(self.heads * SIZE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = CopyTo.apply(x) if self.ranks > 1 else x
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.is_detached:  # as a collective without a backward pass leaves them
            q, k, v = q.detach(), k.detach(), v.detach()
        q = q.unflatten(-1, (self.heads, SIZE)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k[:, None], v[:, None], is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        return ReduceFrom.apply(mixed) if self.ranks > 1 else mixed


class Model(nn.Module):
    def __init__(self, ranks: int = 1, is_detached: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(ranks, is_detached)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


@dataclass
class Run:
    """Training run: what its ranks share, and the mistake in it."""

    tp: int = 1
    dp: int = 1
    clip: float = 0.5
    is_detached: bool = False
    tells_gradients: bool = True  # the adapter tells an output from its gradient
    reported: Callable[[float], float] = float
    change: Callable[[Model, int], object] | None = None

    def cut(self, model: Model, rank: int) -> Model:
        """Return this rank's part of a model."""
        mine = Model(self.tp, self.is_detached)
        parts = {}
        for name, weight in model.state_dict().items():
            dim = {"q.weight": 0, "q.bias": 0, "out.weight": 1}.get(name.removeprefix("attention."))
            parts[name] = weight if dim is None or self.tp == 1 else weight.chunk(self.tp, dim)[rank]
        mine.load_state_dict(parts)
        return mine

    def place(self, what: str, name: str, tensor: Tensor) -> parity.Placement | None:
        if self.tp == 1:
            return parity.whole(tensor, copy=dist.get_rank() if what == "parameter" and self.dp > 1 else 0)
        rank, last = dist.get_rank(), name.removeprefix("attention.")
        if what == "parameter" and last in ("q.weight", "q.bias", "out.weight"):
            return parity.shard(tensor, 1 if last == "out.weight" else 0, rank, self.tp)
        if what != "parameter" and last == "q":
            return parity.shard(tensor, -1, rank, self.tp)
        own = what == "activation" and last == "out"  # a part of the sum over heads; its gradient is whole
        if what == "output gradient" and last in ("k", "v"):
            own = self.tells_gradients
        return parity.whole(tensor, partial=True) if own else parity.whole(tensor, copy=rank)

    def train(self, folder: Path, steps: int = 2) -> None:
        torch.manual_seed(3)
        rank = dist.get_rank() if dist.is_initialized() else 0
        model = self.cut(Model(), rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        axes = {"dp": self.dp, "tp": self.tp}
        place = self.place if self.dp * self.tp > 1 else None
        recorder = parity.Recorder(model, optimizer, place, folder=folder, steps=steps, axes=axes)
        data = torch.Generator().manual_seed(5)
        for step in range(steps):
            batch = torch.randint(WORDS, (4, 9), generator=data)
            mine = batch.chunk(self.dp)[rank % self.dp]
            loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and (self.dp > 1 or name.startswith(("attention.k", "attention.v"))):
                    if self.dp * self.tp > 1:
                        dist.all_reduce(parameter.grad)
                    parameter.grad /= self.dp
            if self.change is not None:
                self.change(model, step)
            if self.dp > 1:
                loss = loss.detach()
                dist.all_reduce(loss)
                loss /= self.dp
            recorder.after_backward(self.reported(loss.item()))
            if self.tp == 1:  # a norm of shards takes another sum
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()


def compared(reference: Path, candidate: Path) -> tuple[Judgement, Findings]:
    found = compare(Record(reference), Record(candidate))
    return judge(found), found


def pair(folder: Path, candidate: Run, reference: Run | None = None) -> Judgement:
    (reference or Run()).train(folder / "reference")
    candidate.train(folder / "candidate")
    return compared(folder / "reference", folder / "candidate")[0]


def halved(loss: float) -> float:
    return loss / 2


def test_a_loss_that_every_rank_divides_departs(tmp_path: Path) -> None:
    """A sum over ranks would be the right loss, but the ranks report the same number, which is no share."""
    Run().train(tmp_path / "reference")
    on_ranks(2, Run.train, Run(dp=2), tmp_path / "right")
    verdict, found = compared(tmp_path / "reference", tmp_path / "right")
    assert verdict.equal, verdict.sentence
    assert not found.shares
    on_ranks(2, Run.train, Run(dp=2, reported=halved), tmp_path / "wrong")
    verdict, _ = compared(tmp_path / "reference", tmp_path / "wrong")
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind) == (1, LOSS), verdict.sentence
    assert verdict.first.shape.endswith(": 1/2 (1 / dp) times"), verdict.sentence


def test_query_key_and_value_behind_a_detach_are_named(tmp_path: Path) -> None:
    """Not the module before them, whose gradient is another one."""
    verdict = pair(tmp_path, Run(is_detached=True))
    assert verdict.first is not None
    assert verdict.first.kind == OUTPUT_GRADIENT, verdict.sentence
    assert verdict.first.name in ("attention.q", "attention.k", "attention.v"), verdict.sentence
    assert verdict.first.shape == "is missing, as after a detach"
    assert {"attention.q", "attention.k", "attention.v"} <= {each.name for each in verdict.together}


@pytest.mark.parametrize("tells", [True, False], ids=["told", "not told"])
def test_multi_query_attention_over_tensor_ranks(tmp_path: Path, tells: bool) -> None:
    """Each rank has the whole key, and of its gradient the part of its own heads: `place` can tell them apart."""
    Run(clip=1e9).train(tmp_path / "reference")
    on_ranks(2, Run.train, Run(tp=2, tells_gradients=tells), tmp_path / "tp")
    verdict, found = compared(tmp_path / "reference", tmp_path / "tp")
    assert verdict.equal == tells, verdict.sentence
    assert found.compared[OUTPUT_GRADIENT] == 2 * 4 * 9  # steps, samples, modules
    if not tells:
        assert verdict.first is not None
        assert (verdict.first.kind, verdict.first.name) == (OUTPUT_GRADIENT, "attention.v"), verdict.sentence


def test_another_clip_is_named_as_a_clip(tmp_path: Path) -> None:
    verdict = pair(tmp_path, Run(clip=0.25))
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == (NORM, "clip factor")
    assert "departs at step 1: the clip factor is " in verdict.sentence
    assert verdict.sentence.endswith(": 1/2 times."), verdict.sentence


def spoiled(value: float, model: Model, step: int) -> None:
    if step == 1:
        assert model.head.bias.grad is not None
        model.head.bias.grad[3] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_in_both_runs_is_not_equal(value: float, tmp_path: Path) -> None:
    spoil = partial(spoiled, value)
    verdict = pair(tmp_path, Run(change=spoil), Run(change=spoil))
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind, verdict.first.name) == (2, GRADIENT, "head.bias")
    start = "The runs cannot be compared at step 2: first the gradient of head.bias: it is not finite in either run"
    assert verdict.sentence.startswith(start), verdict.sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_loss_that_is_not_finite_in_both_runs_is_not_equal(value: float, tmp_path: Path) -> None:
    verdict = pair(tmp_path, Run(reported=lambda loss: value), Run(reported=lambda loss: value))
    assert verdict.sentence == "The runs cannot be compared at step 1: the loss is not finite in either run."


class Masked(nn.Module):
    """Scores with the same infinities behind a causal mask in any run."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.scores, self.sign = Scores(), sign
        self.linear = nn.Linear(21, 21)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.linear(x), self.sign).softmax(-1)


class Scores(nn.Module):
    def forward(self, x: Tensor, sign: float) -> Tensor:
        return (x @ x.mT).masked_fill(torch.ones(21, 21).triu(1).bool(), sign * torch.inf)


def test_the_same_infinities_of_a_mask_are_equal(tmp_path: Path) -> None:
    for name, sign in (("one", -1.0), ("same", -1.0), ("other", 1.0)):
        torch.manual_seed(1)
        model = Masked(sign)
        optimizer = torch.optim.SGD(model.parameters())
        recorder = parity.Recorder(model, optimizer, folder=tmp_path / name, steps=1)
        model(torch.linspace(-1, 1, 2 * 21 * 21).view(2, 21, 21))[:, :, 0].sum().backward()
        recorder.after_backward()
        optimizer.step()
    verdict, _ = compared(tmp_path / "one", tmp_path / "same")
    assert verdict.equal, verdict.sentence
    verdict, _ = compared(tmp_path / "one", tmp_path / "other")
    assert verdict.first is not None
    assert verdict.first.name == "scores", verdict.sentence


def padded_run(
    folder: Path,
    length: int,
    marks: str,
    epoch_steps: int | None = None,
    change: int = 0,
    repeats: bool = False,
    mistake: Callable[[Model], object] = lambda model: None,
) -> None:
    """Train on two samples of 7 and 4 tokens, padded to a length, as batches of other sizes are."""
    torch.manual_seed(3)
    model = Model()
    mistake(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = parity.Recorder(model, optimizer, folder=folder, steps=2, epoch_steps=epoch_steps)
    for step in range(2):
        tokens, labels = torch.zeros(2, length, dtype=torch.int64), torch.full((2, length), -100)
        for row, size in enumerate((7, 4)):
            own = torch.arange(size) * (row + 3) % WORDS + (0 if repeats and row else step)
            own[1] += change
            tokens[row, :size], labels[row, : size - 1] = own, own[1:]
        mask = torch.arange(length)[None] < torch.tensor([7, 4])[:, None]
        given = {"labels": (labels, None), "mask": (None, mask)}
        if marks:
            recorder.batch(tokens, *given[marks])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        recorder.after_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("marks", ["labels", "mask"])
def test_samples_are_matched_without_their_padding(marks: str, tmp_path: Path) -> None:
    """Ranks pad to the longest of their own samples; what a sample is does not depend on it."""
    padded_run(tmp_path / "reference", 8, marks)
    padded_run(tmp_path / "longer", 11, marks)
    verdict, found = compared(tmp_path / "reference", tmp_path / "longer")
    assert verdict.equal, verdict.sentence
    assert found.padded
    assert any(note.startswith("Samples were matched without their padding") for note in found.notes), found.notes
    padded_run(tmp_path / "wrong", 11, marks, change=1)
    verdict, _ = compared(tmp_path / "reference", tmp_path / "wrong")
    assert verdict.sentence.startswith("The runs read different samples at step 1"), verdict.sentence


@pytest.mark.parametrize("length", [8, 11])
def test_samples_that_are_repeated_are_told(length: int, tmp_path: Path) -> None:
    """As by ranks that fill up the last batch of an epoch."""
    padded_run(tmp_path / "reference", 8, "mask")
    padded_run(tmp_path / "repeats", length, "mask", repeats=True)
    verdict, _ = compared(tmp_path / "reference", tmp_path / "repeats")
    assert "samples at step 2: they differ: 1 of 2 are repeated from steps before." in verdict.sentence


def scaled_at_the_last_token(model: Model) -> None:
    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        scale = torch.ones(output.shape[:2])
        scale[1, 3] = 1.01
        return output * scale[..., None]

    model.norm.register_forward_hook(hook)


def wrong_gradient_at_the_last_token(model: Model) -> None:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        scale = torch.ones(output.shape[:2])
        scale[1, 2] = 0.5
        output.register_hook(lambda gradient: gradient * scale[..., None])

    model.attention.q.register_forward_hook(hook)


@pytest.mark.parametrize("marks", ["labels", "mask"])
@pytest.mark.parametrize("length", [7, 11])
def test_outputs_are_compared_without_their_padding(marks: str, length: int, tmp_path: Path) -> None:
    """Of the shorter sample, whatever both are padded to; of the longer, at all positions where it has labels."""
    padded_run(tmp_path / "reference", 8, marks)
    padded_run(tmp_path / "right", length, marks)
    verdict, found = compared(tmp_path / "reference", tmp_path / "right")
    assert verdict.equal, verdict.sentence
    assert not found.skipped
    assert not any("not compared everywhere" in note for note in found.notes)
    if marks == "mask":  # the last token has no label
        padded_run(tmp_path / "scaled", length, marks, mistake=scaled_at_the_last_token)
        verdict, found = compared(tmp_path / "reference", tmp_path / "scaled")
        assert "first the output of norm" in verdict.sentence, verdict.sentence
        assert "1 of 2 samples" in verdict.sentence
    padded_run(tmp_path / "backward", length, marks, mistake=wrong_gradient_at_the_last_token)
    verdict, found = compared(tmp_path / "reference", tmp_path / "backward")
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == (OUTPUT_GRADIENT, "attention.q"), verdict.sentence


def test_positions_of_a_rank_without_padding_are_those_that_are_left(tmp_path: Path) -> None:
    """As of two ranks of context parallelism, each with a chunk of the front and its mirror image."""
    rows = torch.arange(2 * 8 * 3.0).view(2, 8, 3)
    mask = torch.tensor([[1] * 8, [0, 1, 1, 1, 1, 0, 0, 0]])
    padding, names = Padding(), ("long", "short")
    padding.note(names, torch.ones(2, 8, dtype=torch.int64), mask)
    whole = dict(zip(names, rows, strict=True))
    found = {name: torch.full((int(mask[at].sum()), 3), torch.nan) for at, name in enumerate(names)}
    for chunks in ((0, 3), (1, 2)):
        held = torch.cat([rows[:, 2 * number : 2 * number + 2] for number in chunks], 1)
        pieces = (Piece((0, 2 * at, 0), (0, 2 * number, 0), (2, 2, 3)) for at, number in enumerate(chunks))
        for part, placement, samples in padding.without(held, parity.Placement((2, 8, 3), tuple(pieces)), names):
            assert placement.shape[1:] == found[samples[0]].shape
            for piece in placement.pieces:
                at = replace(piece, local=(0, *piece.local[1:]), size=(1, *piece.size[1:]))
                found[samples[0]][piece.box[1:]] = at.of(part)[0]
    assert torch.equal(found["long"], whole["long"])
    assert torch.equal(found["short"], whole["short"][1:5])


def test_padding_that_no_mask_shows_is_said(tmp_path: Path) -> None:
    padded_run(tmp_path / "reference", 8, "")
    padded_run(tmp_path / "longer", 11, "")
    verdict, found = compared(tmp_path / "reference", tmp_path / "longer")
    assert verdict.sentence.startswith("The runs read different samples at step 1"), verdict.sentence
    assert any("give recorder.batch the labels or the attention mask" in note for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("epoch_steps", "said"),
    [
        (None, "not known is whether an epoch ends in them (epoch_steps)"),
        (2, "an epoch of 2 steps ends in them"),
        (5, "seen of an epoch of 5 steps: 1 to 2, not its last batch"),
    ],
)
def test_the_verdict_says_which_part_of_an_epoch_was_seen(epoch_steps: int | None, said: str, tmp_path: Path) -> None:
    padded_run(tmp_path / "record", 8, "labels", epoch_steps)
    verdict, _ = compared(tmp_path / "record", tmp_path / "record")
    assert verdict.sentence.endswith(f"; {said}."), verdict.sentence
