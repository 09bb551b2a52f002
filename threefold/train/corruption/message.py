"""What a watch has found, in one sentence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.errors import HardwareFault
from threefold.train.corruption.gradient_check import Disagreement
from threefold.train.corruption.verdict import Verdict

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
