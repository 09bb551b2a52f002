"""Silent corruption: finds bits that changed on one rank without an error, and names the rank."""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

import torch
from torch import Tensor

from threefold.config import Config
from threefold.data.loader import Loader
from threefold.errors import HardwareFault, UserError
from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import axes_of, is_split, offset
from threefold.parallel.weights import Weight
from threefold.train.gradient_check import BitHash, Disagreement, GradientCheck, combined
from threefold.train.optimizers.base import Entry
from threefold.train.step import Engine, Optimizer


@dataclass(frozen=True)
class Verdict:
    """Which ranks' copies are wrong.

    Attributes:
        ranks: the wrong ones where `is_certain`, else those of which one is wrong, in ascending order.
        is_certain: whether a majority decided.
        others: further ranks with a copy.
    """

    ranks: tuple[int, ...]
    is_certain: bool
    others: tuple[int, ...]


def compare(hashes: Mapping[int, int], column: Callable[[int], Hashable]) -> Verdict | None:
    """Find the wrong copies of one tensor.

    Ranks of a column get one gradient, summed over them, so a copy of theirs that went wrong stays the only one. Ranks
    of other columns, such as tensor-parallel ranks that hold a weight whole, compute their gradients from activations
    that may have gone wrong with it: a whole column may differ from the others when one of its ranks is at fault. So
    a column that has come apart is judged by itself first.

    Args:
        hashes: of the tensor by rank.
        column: by rank, equal for ranks whose gradients are summed.

    Returns:
        None where all are equal.
    """
    if len(set(hashes.values())) <= 1:
        return None
    columns: dict[Hashable, dict[int, int]] = {}
    for rank, value in hashes.items():
        columns.setdefault(column(rank), {})[rank] = value
    apart = [ranks for ranks in columns.values() if len(set(ranks.values())) > 1]
    everywhere = _majority(hashes.values())
    suspects: set[int] = set()
    wrong: set[int] = set()
    for ranks in apart or [dict(hashes)]:
        right = _majority(ranks.values())
        if right is None and everywhere in ranks.values():
            right = everywhere
        found = {rank for rank, value in ranks.items() if value != right}
        (suspects if right is None else wrong).update(found)
    named = tuple(sorted(wrong or suspects))
    return Verdict(named, bool(wrong), tuple(sorted(hashes.keys() - set(named))))


def _majority(values: Iterable[int]) -> int | None:
    """The value of more than half of them."""
    counts = Counter(values)
    value, count = counts.most_common(1)[0]
    return value if 2 * count > counts.total() else None


_NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True)
class Finding:
    """What a watch has found.

    Attributes:
        step: updates made.
        update: the number of the last update that was watched, made or not.
        at_rest: by rank, the tensors that changed between the update before and that one.
        copies: by tensor, which of its copies are wrong.
        hosts: of all ranks.
    """

    step: int
    update: int
    at_rest: Mapping[int, Sequence[str]]
    copies: Mapping[str, Verdict]
    hosts: Sequence[str]


def explain(finding: Finding, newest: Path | None) -> HardwareFault:
    """The error that ends the run.

    A tensor that changed at rest names its rank with certainty, a majority of copies does, and two copies alone do not.
    Of tensors without a majority, those with the fewest suspects are named, as a fault spreads to others.

    Args:
        finding: not empty.
        newest: the folder of the newest checkpoint, whose weights have been compared; None where there is none.
    """
    ranks, sentence = _found(finding)
    return HardwareFault(f"{sentence}; {_resumed(newest)}.", tuple(ranks), finding.step)


def explain_gradients(
    step: int, found: Disagreement, hosts: Sequence[str], newest: Path | None, agreed: int
) -> HardwareFault:
    """The error about gradients that differ.

    Args:
        step: the number of the update that would have used them.
        found: which ranks computed them.
        hosts: of all ranks.
        newest: the folder of the newest checkpoint; None where there is none.
        agreed: the step in which gradients were compared before.
    """
    named = _ranks(found.ranks, hosts)
    others = f" than {_ranks(found.others)}" if found.others else ", computed twice"
    fault = named if len(found.ranks) == 1 else "one of them"
    resumed = "there is no checkpoint to resume from"
    if newest is not None:
        resumed = f"--resume starts from {newest}, and gradients agreed in step {agreed} last"
    return HardwareFault(
        f"In step {step} {named} computed other gradients of the same samples{others}, so arithmetic or memory of "
        f"{fault} has failed; {resumed}.",
        found.ranks,
        step - 1,
    )


def _found(finding: Finding) -> tuple[list[int], str]:
    """The ranks at fault, and a sentence about them without its end."""
    if finding.at_rest:
        ranks = sorted(finding.at_rest)
        what = _listed(label for rank in ranks for label in finding.at_rest[rank])
        return ranks, (
            f"On {_ranks(ranks, finding.hosts)} {what} changed before the update of step {finding.update}, when "
            "nothing writes to it, so memory has failed, or a callback wrote to it"
        )
    certain = {label: verdict for label, verdict in finding.copies.items() if verdict.is_certain}
    fewest = min((len(verdict.ranks) for verdict in finding.copies.values()), default=0)
    chosen = certain or {label: verdict for label, verdict in finding.copies.items() if len(verdict.ranks) == fewest}
    ranks = sorted({rank for verdict in chosen.values() for rank in verdict.ranks})
    others = sorted({rank for verdict in chosen.values() for rank in verdict.others} - set(ranks))
    named, what = _ranks(ranks, finding.hosts), _listed(chosen)
    if certain:
        return ranks, (
            f"After step {finding.step} {named} {'has' if len(ranks) == 1 else 'have'} other bits in {what} than "
            f"{_ranks(others)} with copies of the same, so memory or arithmetic of {named} has failed"
        )
    return ranks, (
        f"After step {finding.step} {named} have different bits in {what}, of which they hold copies, so memory or "
        "arithmetic of one of them has failed, and there is no majority to say of which"
    )


def _resumed(newest: Path | None) -> str:
    if newest is None:
        return "there is no checkpoint to resume from"
    return f"--resume starts from {newest}, from before it"


def _ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Ranks by number, with their hosts where there are several hosts."""
    named = [f"{rank} ({hosts[rank]})" if len(set(hosts)) > 1 else str(rank) for rank in ranks]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_joined(named)}"


def _listed(labels: Iterable[str]) -> str:
    known = list(dict.fromkeys(labels))
    if len(known) > _NAMED:
        return f"{', '.join(known[:_NAMED])} and {len(known) - _NAMED} more tensors"
    return _joined(known)


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@dataclass(frozen=True)
class Watched:
    """A tensor that is to stay as the last update left it.

    Attributes:
        label: what it is, for a message.
        identity: what it is a copy of: ranks whose identities are equal hold the same bits.
        sharing: equal for tensors of this rank that the same ranks have copies of.
        tensor: on this rank.
    """

    label: str
    identity: str
    sharing: tuple[str, ...]
    tensor: Tensor


def watched_tensors(model: TrainableModel, optimizer: Optimizer, sums_alike: bool = True) -> list[Watched]:
    """The weights of this rank, those that it computes with and their masters, and the optimizer state; the same order
    on ranks that hold the same.

    Args:
        model: of this rank.
        optimizer: its.
        sums_alike: as `sums_alike` says; else what tensor ranks hold whole is no copy of one another.
    """
    entries = {entry.name: entry for entry in optimizer.entries}
    return [
        found
        for weight in model.weights
        for found in _of_weight(weight, entries.get(weight.name), model, optimizer, sums_alike)
    ]


def sums_alike(model: TrainableModel) -> bool:
    """Whether tensor ranks add up the gradients of weights that they hold whole in the same order.

    They do on a CPU (`threefold.parallel.gradients`). With NCCL the order of a sum over three replicas or more follows
    from the group of ranks, so that sums may differ by a rounding. The same on all ranks.
    """
    mesh = model.parallelism.mesh
    return mesh.tp.size == 1 or mesh.replicas.size < 3 or mesh.device.type == "cpu"


def most_groups(model: TrainableModel, optimizer: Optimizer) -> int:
    """How many values `sharing` has at most on this rank."""
    return 2 * len({_sharing(weight, model) for weight in model.weights})


def _of_weight(
    weight: Weight, entry: Entry | None, model: TrainableModel, optimizer: Optimizer, alike: bool
) -> Iterator[Watched]:
    column = "" if alike or is_split(weight.parameter) else f" of tensor rank {model.parallelism.mesh.tp.index}"
    place = f"{weight.name}{column} {offset(weight.parameter)}"
    sharing = _sharing(weight, model)
    yield _watched(weight.name, f"{place} master", sharing, weight.master)
    if weight.master is not weight.leaf:
        yield _watched(f"{weight.name}, as computed with,", f"{place} leaf", sharing, weight.leaf)
    if entry is None:  # frozen
        return
    for state, value in optimizer.rule.state(entry).items():
        label = f"{state} of {entry.name}"
        if optimizer.rule.is_replicated(entry, state, value):
            # Cut along no dim of a matrix; of a batch of matrices (experts) a rank has its own.
            batch = offset(entry.parameter)[:-2]
            yield _watched(label, f"{entry.name}{column} {batch} {state}", ("replicated", *sharing), value)
        else:
            yield _watched(label, f"{place} {state}", sharing, value)


def _watched(label: str, identity: str, sharing: tuple[str, ...], tensor: Tensor) -> Watched:
    return Watched(label, f"{identity} {tuple(tensor.shape)} {tensor.dtype}", sharing, tensor)


def _sharing(weight: Weight, model: TrainableModel) -> tuple[str, ...]:
    tied = (weight.name,) if weight.name in model.tied else ()
    return (*sorted(axes_of(weight.parameter)), *tied)


def grouped(watched: Sequence[Watched]) -> Mapping[tuple[str, ...], list[int]]:
    """The places in `watched` by `sharing`."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, each in enumerate(watched):
        groups.setdefault(each.sharing, []).append(place)
    return groups


def identity_of(watched: Sequence[Watched]) -> int:
    """A positive 63-bit number that is equal for equal identities in equal order."""
    digest = hashlib.blake2b("\n".join(each.identity for each in watched).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


class CorruptionWatch:
    """Compares hashes of weights and optimizer state every `every` steps, and before a checkpoint is saved.

    Collective over the world, but for `begin` and, unless gradients are watched, `before_update`.

    Args:
        engine: whose weights and optimizer state they are.
        every: steps between two watches, at least 1.
        newest: returns the folder of the newest checkpoint; None where there is none. Called on every rank.
        gradients: compares the gradients of the steps that are watched; None to leave them out.
    """

    def __init__(
        self,
        engine: Engine,
        every: int,
        newest: Callable[[], Path | None] = lambda: None,
        gradients: GradientCheck | None = None,
    ) -> None:
        self._engine, self._every, self._newest, self._gradients = engine, every, newest, gradients
        self._hash = BitHash(engine.mesh.device)
        groups = torch.tensor([most_groups(engine.model, engine.optimizer)], device=engine.mesh.device)
        self._groups = int(engine.mesh.world.all_reduce_max_(groups))
        self._sums_alike = sums_alike(engine.model)
        self._at_rest: tuple[int, Tensor] | None = None
        """How often the state had been restored, and its hashes after an update."""
        self._changed: Tensor | None = None
        self._update, self._compared = 0, -1
        self._gradients_agreed = 0

    def begin(self, step: int) -> None:
        """Note the state before the first step of this process, and after a rollback.

        Args:
            step: updates made.
        """
        if step:  # else optimizers of others have no state yet
            self._note(step, None)
        self._gradients_agreed, self._compared = step, -1

    def is_proved(self, step: int) -> bool:
        """Whether all that is watched has been compared and found right since a checkpoint was saved.

        Args:
            step: updates made when it was saved.
        """
        return self._gradients is None or self._gradients_agreed >= step

    def before_forward(self, step: int) -> None:
        """Compute the gradients a first time where they are watched; collective then.

        Args:
            step: the number of the update that comes, 1 for the first.
        """
        if self._gradients is not None and step % self._every == 0:
            self._gradients.before_forward(step)

    def before_update(self, step: int) -> None:
        """Compare the state with that after the update before, and the gradients; collective where these are watched.

        Args:
            step: the number of the update that comes, 1 for the first.

        Raises:
            HardwareFault: on every rank, when ranks computed other gradients of the same samples.
        """
        self._changed, self._update = None, step
        if step % self._every == 0 and self._at_rest is not None:
            restored, before = self._at_rest
            now = self._hashes(self._watched())
            if restored == self._engine.optimizer.restorations and before.shape == now.shape:
                self._changed = now != before
        if self._gradients is not None and step % self._every == 0:
            if found := self._gradients.compare(step):
                self._compare(step - 1)  # weights that differ are the cause of gradients that do
                hosts = self._engine.mesh.world.gather_objects(gethostname())
                raise explain_gradients(step, found, hosts, self._newest(), self._gradients_agreed)
            self._gradients_agreed = step

    def after_update(self, step: int) -> None:
        """Compare the copies if a watch is due.

        Args:
            step: the number of the update that was made.

        Raises:
            HardwareFault: on every rank, when copies differ, or a rank's state changed before the update.
        """
        self._note(step, self._compare(step) if step % self._every == 0 else None)
        self._changed = None

    def before_save(self, step: int) -> None:
        """Compare the copies, so that no checkpoint is written of copies that differ.

        Args:
            step: updates made.

        Raises:
            HardwareFault: as `after_update`.
        """
        if self._compared != step:
            self._compare(step)

    def after_divergence(self, step: int) -> None:
        """Compare the copies when an update could not be made, as a wrong bit may be why loss or gradient is not
        finite.

        Args:
            step: updates made.

        Raises:
            HardwareFault: as `after_update`.
        """
        self._compare(step)

    def _note(self, step: int, hashes: Tensor | None) -> None:
        """Keep the hashes where the next update is watched."""
        self._at_rest = None
        if (step + 1) % self._every == 0:
            known = self._hashes(self._watched()) if hashes is None else hashes
            self._at_rest = self._engine.optimizer.restorations, known

    def _watched(self) -> list[Watched]:
        return watched_tensors(self._engine.model, self._engine.optimizer, self._sums_alike)

    def _hashes(self, watched: Sequence[Watched]) -> Tensor:
        """int64 [tensors]."""
        with torch.no_grad():
            found = [self._hash(each.tensor) for each in watched]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=self._engine.mesh.device)

    def _compare(self, step: int) -> Tensor:
        """Exchange the hashes of groups of tensors; returns those of this rank's tensors."""
        watched = self._watched()
        hashes, groups = self._hashes(watched), grouped(watched)
        device = self._engine.mesh.device
        row = torch.zeros(1, 1 + 2 * self._groups, dtype=torch.int64, device=device)
        if self._changed is not None:
            row[0, 0] = self._changed.sum()
        for place, members in enumerate(groups.values()):
            row[0, 1 + 2 * place] = identity_of([watched[member] for member in members])
            row[0, 2 + 2 * place] = combined(hashes[torch.tensor(members, device=device)])
        table = self._engine.mesh.world.all_gather_equal(row, 0).tolist()
        if any(row[0] for row in table) or _differ(table):
            raise self._fault(step, watched, hashes)
        self._compared = step
        return hashes

    def _fault(self, step: int, watched: Sequence[Watched], hashes: Tensor) -> HardwareFault:
        """What has gone wrong, from the hashes of all tensors of all ranks."""
        mine = {each.identity: value for each, value in zip(watched, hashes.tolist(), strict=True)}
        labels = {each.identity: each.label for each in watched}
        changed = [] if self._changed is None else self._changed.tolist()
        at_rest = [each.label for each, differs in zip(watched, changed, strict=False) if differs]
        found = self._engine.mesh.world.gather_objects((mine, labels, at_rest, gethostname()))
        layout = self._engine.mesh.layout
        places = [layout.coordinates(rank) for rank in range(layout.world_size)]
        verdicts = _verdicts([each[0] for each in found], lambda rank: (places[rank].pp, places[rank].tp))
        names = {identity: label for each in found for identity, label in each[1].items()}
        finding = Finding(
            step,
            self._update,
            at_rest={rank: each[2] for rank, each in enumerate(found) if each[2]},
            copies={names[identity]: verdict for identity, verdict in verdicts.items()},
            hosts=[each[3] for each in found],
        )
        return explain(finding, self._newest())


def make_watch(
    engine: Engine, loader: Loader, newest: Callable[[], Path | None] = lambda: None
) -> CorruptionWatch | None:
    """The watch that the engine's config asks for; None for none. Collective over the world.

    Args:
        engine: whose state is watched.
        loader: of this replica.
        newest: as of `CorruptionWatch`.
    """
    train = engine.config.train
    if not train.watch_every:
        return None
    gradients = GradientCheck(engine, loader) if train.watch == "gradients" else None
    return CorruptionWatch(engine, train.watch_every, newest, gradients)


def check_device(config: Config) -> None:
    """Check that what a resolved config watches can be watched on its device.

    Raises:
        UserError: it cannot.
    """
    train = config.train
    if train.watch_every and train.watch == "gradients" and train.device == "cuda":
        raise UserError(
            "train.watch is gradients but on a GPU the same step need not give the same bits twice (train.device is "
            "cuda); use weights."
        )


def _differ(table: Sequence[Sequence[int]]) -> bool:
    """Whether ranks with copies of a group have other hashes of it."""
    known: dict[int, int] = {}
    pairs = ((row[place], row[place + 1]) for row in table for place in range(1, len(row), 2) if row[place])
    return any(known.setdefault(identity, value) != value for identity, value in pairs)


def _verdicts(hashes: Sequence[Mapping[str, int]], column: Callable[[int], tuple[int, int]]) -> dict[str, Verdict]:
    """By identity, of the tensors whose copies differ."""
    by_identity: dict[str, dict[int, int]] = {}
    for rank, mine in enumerate(hashes):
        for identity, value in mine.items():
            by_identity.setdefault(identity, {})[rank] = value
    compared = {identity: compare(values, column) for identity, values in by_identity.items()}
    return {identity: verdict for identity, verdict in compared.items() if verdict is not None}
