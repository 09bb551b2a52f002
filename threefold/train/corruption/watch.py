"""The silent corruption watch: hashes of what a rank holds, compared with the other copies and with themselves.

A flipped bit in memory or an arithmetic unit that computes wrong raises no error; the run trains on with other weights
on one rank (Dixit et al., "Silent data corruptions at scale", arXiv 2102.11245). Two comparisons find it:

- Copies. What several ranks hold (over dp and cp, over tp what its ranks hold whole, tied embeddings over pp, the
  copies of hybrid ZeRO) is the same bits on all of them after every update, as their gradients are. Megatron-LM
  compares hashes of weights over dp so (`--check-weight-hash-across-dp-replicas-interval`).
- At rest. Between two updates nothing writes to weights and optimizer state, so they are the same bits before an update
  as after the one before it. This covers what no other rank has a copy of, as with ZeRO, and names the rank for sure.

A watch costs three hashes of this rank's state and one all-gather of a few numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import gethostname

import torch
from torch import Tensor

from threefold.config import Config
from threefold.data.loader import Loader
from threefold.errors import HardwareFault, UserError
from threefold.train.corruption.bit_hash import BitHash, combined
from threefold.train.corruption.gradient_check import GradientCheck
from threefold.train.corruption.message import Finding, explain, explain_gradients
from threefold.train.corruption.verdict import Verdict, compare
from threefold.train.corruption.watched import Watched, grouped, identity_of, most_groups, sums_alike, watched_tensors
from threefold.train.engine import Engine


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
