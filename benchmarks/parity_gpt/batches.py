"""Data: a sampler with a state, samples made from their numbers, and micro-batches with the weight of each token."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .grid import part, sum_over
from .run import Run


class Sampler:
    """Draws an order of all samples for each epoch; its state continues it at the next sample."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.generator = torch.Generator()
        self.generator.manual_seed(run.options.seed)
        self.drawn_from = self.generator.get_state()
        self.cursor = 0
        self.order = self._draw()

    def _draw(self) -> list[int]:
        self.drawn_from = self.generator.get_state()
        options = self.run.options
        if options.mixture:
            shares = [options.samples / 3, options.samples * 2 / 3]
            if self.run.mistake("olmo-mixture"):
                counts = [math.ceil(share) for share in shares]
            else:
                counts = [round(shares[0]), options.samples - round(shares[0])]
            sizes = [round(shares[0]), options.samples - round(shares[0])]
            return [1000 * source + i % sizes[source] for source, n in enumerate(counts) for i in range(n)]
        return torch.randperm(options.samples, generator=self.generator).tolist()

    def next(self, count: int) -> list[int]:
        """Return the numbers of the next samples."""
        found: list[int] = []
        while len(found) < count:
            if self.cursor == len(self.order):
                self.order, self.cursor = self._draw(), 0
            taken = self.order[self.cursor : self.cursor + count - len(found)]
            self.cursor += len(taken)
            found += taken
        return found

    def state(self) -> dict[str, Any]:
        generator = torch.get_rng_state() if self.run.mistake("deepspeed-8405") else self.drawn_from
        return {"generator": generator, "cursor": self.cursor}

    def load(self, state: dict[str, Any]) -> None:
        if self.run.mistake("deepspeed-8405"):
            torch.set_rng_state(state["generator"])
        elif not self.run.mistake("swift-10050"):
            self.generator.set_state(state["generator"])
            self.order = self._draw()
        self.cursor = state["cursor"]
        if self.run.mistake("swift-10099"):  # each prompt was counted once per generated answer
            self.cursor = self.cursor * 4 % len(self.order)
        if self.run.mistake("verl-7401") and self.cursor == len(self.order):
            self._draw()  # the epoch that follows, taken as the one that has ended


@dataclass
class Sample:
    tokens: Tensor
    labels: Tensor
    extra_labels: Tensor
    positions: Tensor


def sample(run: Run, number: int) -> Sample:
    """Make a sample from its number: each token follows from the one before, with noise."""
    options = run.options
    generator = torch.Generator()
    generator.manual_seed(number + 77)
    noise = torch.randint(0, 5, (options.length + 2,), generator=generator).tolist()
    text = [int(torch.randint(0, options.vocab, (), generator=generator))]
    for each in noise:
        text.append((3 * text[-1] + each) % options.vocab)
    tokens, labels, extra = (torch.tensor(text[at : at + options.length]) for at in range(3))
    if options.masked:
        left_out = number * 5 % (options.length // 2)
        labels[:left_out], extra[:left_out] = -100, -100
    extra[-1] = -100  # as if shifted within the sample
    positions = torch.arange(options.length)
    if options.documents:
        positions = positions + number % 3 * options.length
        if run.mistake("torchtitan-2849"):
            positions = positions % options.length
    return Sample(tokens, labels, extra, positions)


@dataclass
class MicroBatch:
    """Samples that pass through the pipeline together; this cp rank's part of their sequences.

    Attributes:
        whole_tokens: tokens of the whole sequences.
        whole_labels: their labels.
        tokens, labels, extra_labels, positions: this rank's part.
        weight: weight of each token's loss.
        extra_weight: the same for the extra head.
        auxiliary_weight: weight of each sequence's auxiliary loss.
    """

    whole_tokens: Tensor
    whole_labels: Tensor
    tokens: Tensor
    labels: Tensor
    extra_labels: Tensor
    positions: Tensor
    weight: Tensor
    extra_weight: Tensor
    auxiliary_weight: float

    @property
    def valid(self) -> Tensor:
        return self.labels >= 0


def passes(run: Run, numbers: list[int]) -> list[list[MicroBatch]]:
    """Split a step's samples over passes, data ranks and micro-batches, and weigh each token's loss.

    A pass's gradients are divided by its number of micro-batches, and the step's are averaged over the data ranks, so
    weights are multiplied by both: the result is the mean over all labels of the step.
    """
    options, grid = run.options, run.grid
    found = []
    for number, piece in enumerate(_split(numbers, options.accumulate)):
        mine = _split(piece, grid.dp.size)[grid.dp.rank]
        length = options.length // 2 if options.variable and number % 2 else options.length
        found.append([_micro_batch(run, each, length) for each in _split(mine, options.micro_batches)])
    every = [micro for each in found for micro in each]
    factor = run.options.micro_batches * run.replicas
    total = _labels(run, [micro.labels for micro in every])
    extra_total = _labels(run, [micro.extra_labels for micro in every])
    for micro in every:
        valid, own = micro.valid.float(), micro.valid.sum().clamp(min=1)
        micro.weight = valid * factor / total
        micro.extra_weight = 0.3 * (micro.extra_labels >= 0) * factor / extra_total
        if run.mistake("megatron-adfa873d", "torchtitan-2206"):
            micro.weight = valid / (own * options.accumulate)
        elif run.mistake("transformers-34191"):
            micro.weight = valid / own
        elif run.mistake("megatron-2756"):
            local = torch.stack([each.valid.sum() for each in every]).sum()
            micro.weight = valid * factor / sum_over(local, grid.dp)
        elif run.mistake("megatron-1532"):
            micro.extra_weight = micro.extra_weight * extra_total
        micro.auxiliary_weight = grid.cp.size / (options.accumulate * len(micro.tokens))
    return found


def _labels(run: Run, labels: list[Tensor]) -> Tensor:
    return sum_over(torch.stack([(each >= 0).sum() for each in labels]).sum(), run.grid.data)


def _split(numbers: list[int], count: int) -> list[list[int]]:
    if len(numbers) % count:
        raise SystemExit(f"{len(numbers)} samples do not divide by {count}")
    each = len(numbers) // count
    return [numbers[at * each : (at + 1) * each] for at in range(count)]


def _micro_batch(run: Run, numbers: list[int], length: int) -> MicroBatch:
    samples = [sample(run, number) for number in numbers]
    cp = run.grid.cp
    tokens, labels, extra, positions = (
        torch.stack([getattr(each, name)[:length] for each in samples])
        for name in ("tokens", "labels", "extra_labels", "positions")
    )
    mine = [part(each, cp, 1) for each in (tokens, labels, extra)]
    if run.mistake("megatron-3603"):
        my_positions = part(positions, cp, 0).reshape(len(numbers), -1)
    else:
        my_positions = part(positions, cp, 1)
    nothing = torch.zeros(())
    return MicroBatch(tokens, labels, mine[0], mine[1], mine[2], my_positions, nothing, nothing, 0.0)
