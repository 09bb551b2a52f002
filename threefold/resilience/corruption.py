"""Silent data corruption: detects bits that changed on one rank without an error, and names the rank.

The watch compares a fast exact hash of each tensor's bits (`threefold.resilience.bit_hash`), and with `GradientCheck`
also the gradients that two replicas compute from the same samples.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Final, NamedTuple

import torch
from torch import Tensor

from threefold.comm.layout import Layout
from threefold.data.loader import Loader
from threefold.errors import HardwareFault
from threefold.files import first_of
from threefold.models.layers.experts import Routing
from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import Weight, axes_of, is_split, offset
from threefold.random.rng import draws_in_sequence
from threefold.resilience.bit_hash import bit_hash, combined
from threefold.train.callbacks.base import Guard
from threefold.train.optim import Optimizer
from threefold.train.step import Engine


class Verdict(NamedTuple):
    """Ranks whose copies of a tensor, or whose gradients of the same samples, are wrong.

    `ranks` are the wrong ones if `is_certain`, as by a majority; otherwise the suspects, one of which is wrong.
    `others` are further ranks with a copy, or with the same samples. All in ascending order.
    """

    ranks: tuple[int, ...]
    is_certain: bool
    others: tuple[int, ...]


class GradientCheck:
    """Bit-exact comparison of a step's gradients with those that another replica computes from the same samples.

    Without another replica, a rank computes its own gradients twice. It also does so for layers that draw random
    numbers in sequence, and for experts, as their results depend on the samples of other replicas too. All methods are
    collective over the world.
    """

    def __init__(self, engine: Engine, loader: Loader) -> None:
        self._engine, self._loader = engine, loader
        layout = engine.mesh.layout
        bound = any(draws_in_sequence(module) or isinstance(module, Routing) for module in engine.model.modules())
        somewhere = engine.mesh.world.all_reduce_max_(torch.tensor([int(bound)], device=engine.mesh.device))
        self._shift = 0 if bool(somewhere) else 1
        self._next = (engine.mesh.dp.index + self._shift) % layout.dp
        self._sum = torch.zeros((), dtype=torch.int64, device=engine.mesh.device)
        self._checked = self._sum

    def before_forward(self, step: int) -> None:
        """Compute the next replica's gradients of update `step`, then observe the step's own gradients."""
        self._checked = self._computed(self._next, step)
        self._observe()

    def compare(self, step: int) -> Verdict | None:
        """Compare the gradients once the step's own have been computed; None if they agree."""
        local, replica = self._observed(), self._engine.mesh.dp.index
        table, layout = self._exchanged(local, self._checked), self._engine.mesh.layout
        pairs = []  # (checker, owner) of hashes of the owner's gradients that differ
        for checker, (_, checked) in enumerate(table):
            place = layout.coordinates(checker)
            owner = layout.rank_of(**place._replace(dp=(place.dp + self._shift) % layout.dp)._asdict())
            if table[owner][0] != checked:
                pairs.append((checker, owner))
        if not pairs:
            return None
        again = self._exchanged(self._computed(replica, step), self._computed(self._next, step))
        unstable = [rank for rank, (before, now) in enumerate(zip(table, again, strict=True)) if before != now]
        return disagreement(pairs, unstable, layout)

    def _exchanged(self, local: Tensor, checked: Tensor) -> list[list[int]]:
        row = torch.stack([local, checked]).view(1, 2)
        return list(self._engine.mesh.world.all_gather_equal(row, 0).tolist())

    def _computed(self, replica: int, step: int) -> Tensor:
        """Return the hash of this rank's part of the gradients of a replica's samples."""
        loader = self._loader.of_replica(replica)
        self._observe()
        with self._engine.preserved():
            rows = torch.from_numpy(loader.rows(step - 1))
            self._engine.compute_gradients(loader.batch(step - 1), step - 1, rows=rows)
        return self._observed()

    def _observe(self) -> None:
        def add(gradients: Tensor) -> None:
            self._sum = self._sum + bit_hash(gradients, self._sum.device)

        self._sum = torch.zeros_like(self._sum)
        self._engine.gradients.observe(add)

    def _observed(self) -> Tensor:
        self._engine.gradients.observe(None)
        return self._sum


def disagreement(pairs: Sequence[tuple[int, int]], unstable: Sequence[int], layout: Layout) -> Verdict:
    """Find the ranks at fault, from the (checker, owner) pairs that disagree (at least one).

    Ranks are `unstable` if their second computation gave different results.
    """
    everyone = {rank for pair in pairs for rank in pair}
    if unstable:
        ranks = set(unstable)
    else:  # a replica that is always wrong disagrees with the replica it checks and with its checker
        replica = {rank: layout.coordinates(rank).dp for rank in everyone}
        met = {frozenset((replica[checker], replica[owner])) for checker, owner in pairs}
        times = Counter(place for pair in met for place in pair)
        most = max(times.values())
        ranks = {rank for rank in everyone if times[replica[rank]] == most}
    return Verdict(tuple(sorted(ranks)), len(ranks) == 1, tuple(sorted(everyone - ranks)))


def compare(hashes: Mapping[int, int], column: Callable[[int], Hashable]) -> Verdict | None:
    """Find the wrong copies of one tensor, given its hash by rank; None if all are equal.

    The ranks of a column (for which `column` returns an equal key) apply the same summed gradient, so a wrong copy in a
    column stays the only wrong one. Ranks of different columns, such as tensor-parallel ranks that hold a weight whole,
    compute their gradients from activations that may be wrong too: one faulty rank can make a whole column differ from
    the others. A column that disagrees within itself is therefore judged by itself first.
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
    counts = Counter(values)
    value, count = counts.most_common(1)[0]
    return value if 2 * count > counts.total() else None


_NOTHING_SAVED: Final = "there is no checkpoint to resume from"
_NAMED: Final = 3  # maximum number of tensors that a message names


def explain(
    step: int,
    update: int,
    at_rest: Mapping[int, Sequence[str]],
    copies: Mapping[str, Verdict],
    hosts: Sequence[str],
    newest: Path | None,
) -> HardwareFault:
    """Return the error that ends the run after `step` updates, of which `update` was the last watched one, made or not.

    A tensor that changed at rest names its rank with certainty, and so does a majority of copies; two copies alone do
    not. Among tensors without a majority, those with the fewest suspects are named, as a fault spreads to others.

    Args:
        at_rest: by rank, the tensors that changed between the previous update and that one.
        copies: by tensor, its wrong copies.
        hosts: host names of all ranks.
        newest: newest checkpoint, whose weights have been compared.
    """
    resumed = f"--resume starts from {newest}, from before it" if newest else _NOTHING_SAVED
    if at_rest:
        ranks = tuple(sorted(at_rest))
        what = _listed(label for rank in ranks for label in at_rest[rank])
        sentence = (
            f"On {_ranks(ranks, hosts)} {what} changed before the update of step {update}, when "
            "nothing writes to it, so memory has failed, or a callback wrote to it"
        )
        return HardwareFault(f"{sentence}; {resumed}.", ranks, step)
    certain = {label: verdict for label, verdict in copies.items() if verdict.is_certain}
    fewest = min((len(verdict.ranks) for verdict in copies.values()), default=0)
    chosen = certain or {label: verdict for label, verdict in copies.items() if len(verdict.ranks) == fewest}
    ranks = tuple(sorted({rank for verdict in chosen.values() for rank in verdict.ranks}))
    named, what = _ranks(ranks, hosts), _listed(chosen)
    if certain:
        others = sorted({rank for verdict in chosen.values() for rank in verdict.others} - set(ranks))
        sentence = (
            f"{'has' if len(ranks) == 1 else 'have'} other bits in {what} than {_ranks(others)} with copies of the "
            f"same, so memory or arithmetic of {named} has failed"
        )
    else:
        sentence = (
            f"have different bits in {what}, of which they hold copies, so memory or arithmetic of one of them has "
            "failed, and there is no majority to say of which"
        )
    return HardwareFault(f"After step {step} {named} {sentence}; {resumed}.", ranks, step)


def _ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Name ranks by number, with their hosts if there are several hosts."""
    named = [f"{rank} ({hosts[rank]})" if len(set(hosts)) > 1 else str(rank) for rank in ranks]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_joined(named)}"


def _listed(labels: Iterable[str]) -> str:
    known = list(dict.fromkeys(labels))
    return first_of(known, _NAMED, "tensors") if len(known) > _NAMED else _joined(known)


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class Watched(NamedTuple):
    """Tensor that must stay unchanged between updates, with the label for a message.

    Ranks with equal identities hold copies with the same bits. `sharing` is equal for tensors of this rank with copies
    on the same ranks.
    """

    label: str
    identity: str
    sharing: tuple[str, ...]
    tensor: Tensor


def watched_tensors(model: TrainableModel, optimizer: Optimizer, sums_alike: bool = True) -> list[Watched]:
    """Return this rank's weights (both the computed ones and their masters) and optimizer state.

    The order is the same on ranks that hold the same tensors. Unless `sums_alike`, whole tensors of tensor-parallel
    ranks do not count as copies of one another.
    """
    found: list[Watched] = []

    def add(label: str, identity: str, sharing: tuple[str, ...], tensor: Tensor) -> None:
        found.append(Watched(label, f"{identity} {tuple(tensor.shape)} {tensor.dtype}", sharing, tensor))

    entries, rule = {entry.name: entry for entry in optimizer.entries}, optimizer.rule
    for weight in model.weights:
        alike = sums_alike or is_split(weight.parameter)
        column = "" if alike else f" of tensor rank {model.parallelism.mesh.tp.index}"
        place, sharing = f"{weight.name}{column} {offset(weight.parameter)}", _sharing(weight, model)
        add(weight.name, f"{place} master", sharing, weight.master)
        if weight.master is not weight.leaf:
            add(f"{weight.name}, as computed with,", f"{place} leaf", sharing, weight.leaf)
        entry = entries.get(weight.name)
        if entry is None:  # frozen
            continue
        if optimizer.average is not None:
            add(f"average of {weight.name}", f"{place} average", sharing, optimizer.average.tensors[weight.name])
        for state, value in rule.state(entry).items():
            label = f"{state} of {weight.name}"
            if rule.is_replicated(entry, state, value):
                # Replicated over the dims of a matrix; of a batch of matrices (experts), each rank has its own.
                batch = offset(weight.parameter)[:-2]
                add(label, f"{weight.name}{column} {batch} {state}", ("replicated", *sharing), value)
            else:
                add(label, f"{place} {state}", sharing, value)
    return found


def _sharing(weight: Weight, model: TrainableModel) -> tuple[str, ...]:
    tied = (weight.name,) if weight.name in model.tied else ()
    return (*sorted(axes_of(weight.parameter)), *tied)


class CorruptionWatch(Guard):
    """Watch that compares hashes of weights and optimizer state every `every` steps, and before each checkpoint.

    Comparisons are collective over the world, and so is making the watch. `newest` returns the folder of the newest
    checkpoint, and is called on every rank; `gradients` compares the gradients of the watched steps, if given.

    Raises:
        HardwareFault: on every rank, if copies differ, a rank's state changed before an update, or ranks computed
            different gradients of the same samples.
    """

    def __init__(
        self,
        engine: Engine,
        every: int,
        newest: Callable[[], Path | None] = lambda: None,
        gradients: GradientCheck | None = None,
    ) -> None:
        self._engine, self._every, self._newest, self._gradients = engine, every, newest, gradients
        mesh = engine.mesh
        most = 2 * len({_sharing(weight, engine.model) for weight in engine.model.weights})
        self._groups = int(mesh.world.all_reduce_max_(torch.tensor([most], device=mesh.device)))
        # On a CPU tensor-parallel ranks sum the gradients of weights that they hold whole in the same order. With NCCL,
        # the order of a sum over three or more replicas depends on the group of ranks, so sums may differ by rounding.
        self._sums_alike = mesh.tp.size == 1 or mesh.replicas.size < 3 or mesh.device.type == "cpu"
        self._at_rest: tuple[int, Tensor] | None = None  # number of restorations, and the hashes after an update
        self._changed: Tensor | None = None
        self._update, self._compared = 0, -1
        self._gradients_agreed = 0

    def before_fit(self, start: int) -> None:
        self._gradients_agreed, self._compared = start, -1
        if start:  # before the first step, other packages' optimizers have no state
            self._note(start, None)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.before_fit(start)

    def is_proved(self, step: int) -> bool:
        """Return whether all comparisons since the checkpoint of `step` updates were made and found no difference."""
        return self._gradients is None or self._gradients_agreed >= step

    def before_forward(self, step: int) -> None:
        if self._gradients is not None and step % self._every == 0:
            self._gradients.before_forward(step)

    def before_update(self, step: int) -> None:
        """Compare the state with the state after the previous update, and the gradients if they are watched."""
        self._changed, self._update = None, step
        if step % self._every == 0 and self._at_rest is not None:
            restored, before = self._at_rest
            now = self._hashes(self._watched)
            if restored == self._engine.optimizer.restorations and before.shape == now.shape:
                self._changed = now != before
        if self._gradients is not None and step % self._every == 0:
            if found := self._gradients.compare(step):
                self._compare(step - 1)  # weights that differ would explain gradients that differ
                named = _ranks(found.ranks, self._engine.mesh.world.gather_objects(gethostname()))
                others = f" than {_ranks(found.others)}" if found.others else ", computed twice"
                fault = named if found.is_certain else "one of them"
                agreed, newest = f"gradients agreed in step {self._gradients_agreed} last", self._newest()
                resumed = f"--resume starts from {newest}, and {agreed}" if newest else _NOTHING_SAVED
                raise HardwareFault(
                    f"In step {step} {named} computed other gradients of the same samples{others}, so arithmetic or "
                    f"memory of {fault} has failed; {resumed}.",
                    found.ranks,
                    step - 1,
                )
            self._gradients_agreed = step

    def after_update(self, step: int) -> None:
        self._note(step, self._compare(step) if step % self._every == 0 else None)
        self._changed = None

    def before_save(self, step: int) -> None:
        """Compare the copies, so that no checkpoint is written from copies that differ."""
        if self._compared != step:
            self._compare(step)

    def after_divergence(self, step: int) -> None:
        """Compare the copies after a step without an update, which a wrong bit may have caused."""
        self._compare(step)

    def _note(self, step: int, hashes: Tensor | None) -> None:
        self._at_rest = None
        if (step + 1) % self._every == 0:
            known = self._hashes(self._watched) if hashes is None else hashes
            self._at_rest = self._engine.optimizer.restorations, known

    @property
    def _watched(self) -> list[Watched]:
        return watched_tensors(self._engine.model, self._engine.optimizer, self._sums_alike)

    def _hashes(self, watched: Sequence[Watched]) -> Tensor:
        with torch.no_grad():
            found = [bit_hash(each.tensor, self._engine.mesh.device) for each in watched]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=self._engine.mesh.device)

    def _compare(self, step: int) -> Tensor:
        """Exchange one hash per group of tensors; return the hashes of this rank's tensors."""
        watched, groups = self._watched, dict[tuple[str, ...], list[int]]()
        for place, each in enumerate(watched):
            groups.setdefault(each.sharing, []).append(place)
        hashes, device = self._hashes(watched), self._engine.mesh.device
        row = torch.zeros(1, 1 + 2 * self._groups, dtype=torch.int64, device=device)
        if self._changed is not None:
            row[0, 0] = self._changed.sum()
        for place, members in enumerate(groups.values()):
            identities = "\n".join(watched[member].identity for member in members)
            digest = hashlib.blake2b(identities.encode(), digest_size=8).digest()
            row[0, 1 + 2 * place] = int.from_bytes(digest, "little") >> 1 or 1  # 0 is not a group
            row[0, 2 + 2 * place] = combined(hashes[torch.tensor(members, device=device)])
        table = self._engine.mesh.world.all_gather_equal(row, 0).tolist()
        known: dict[int, int] = {}  # hash of each group of copies
        pairs = [(row[place], row[place + 1]) for row in table for place in range(1, len(row), 2) if row[place]]
        if any(row[0] for row in table) or any(known.setdefault(group, value) != value for group, value in pairs):
            raise self._fault(step, watched, hashes)
        self._compared = step
        return hashes

    def _fault(self, step: int, watched: Sequence[Watched], hashes: Tensor) -> HardwareFault:
        """Return the error, from the hashes of all tensors of all ranks."""
        layout = self._engine.mesh.layout
        held = [(each.identity, each.label, value) for each, value in zip(watched, hashes.tolist(), strict=True)]
        changed = [] if self._changed is None else self._changed.tolist()
        at_rest = [each.label for each, differs in zip(watched, changed, strict=False) if differs]
        found = self._engine.mesh.world.gather_objects((held, at_rest, gethostname()))
        columns = [(place.pp, place.tp) for place in map(layout.coordinates, range(layout.world_size))]
        labels: dict[str, str] = {}
        by_identity: dict[str, dict[int, int]] = {}
        for rank, (tensors, *_) in enumerate(found):
            for identity, label, value in tensors:
                labels[identity] = label
                by_identity.setdefault(identity, {})[rank] = value
        verdicts = {identity: compare(values, columns.__getitem__) for identity, values in by_identity.items()}
        return explain(
            step,
            self._update,
            {rank: changed for rank, (_, changed, _) in enumerate(found) if changed},
            {labels[identity]: verdict for identity, verdict in verdicts.items() if verdict is not None},
            [host for *_, host in found],
            self._newest(),
        )
