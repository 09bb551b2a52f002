"""Collectives of one training step in many layouts as the mesh records them, and the golden file that holds them.

After an intended change, rewrite the file with `python -m tests.planner.golden_collectives`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from tests.support.parity import LLAMA_SIZES, MOE_SIZES, Case, make_engine, shard_of
from threefold.comm.axis import Event

FILE = Path(__file__).with_name("data") / "collectives.json"

Sequences = list[list[str]]
"""One sequence per rank: `axis operation bytes` of each collective, in the order in which the rank entered them."""

SEQUENCE: tuple[str, Any] = ("parallel.sequence_parallel", True)
LLAMA = tuple(each for each in LLAMA_SIZES if each[0] in ("architecture", "num_key_value_heads", "head_dim", "qk_norm"))
MIXTURE = tuple(each for each in MOE_SIZES if each[0] not in ("expert_capacity_factor", "shared_expert_gate"))


def _gpt(dp: int = 1, tp: int = 1, pp: int = 1, *settings: tuple[str, Any], **changes: Any) -> Case:
    return Case(dp=dp, tp=tp, pp=pp, **{"sequence": 12, "layers": 4, "settings": settings, **changes})


def _llama(dp: int, tp: int, pp: int, *settings: tuple[str, Any], **changes: Any) -> Case:
    return _gpt(dp, tp, pp, *settings, **{"model": LLAMA, "positions": "rope", "tie": False, **changes})


def _mixture(dp: int, tp: int, pp: int, *settings: tuple[str, Any], **changes: Any) -> Case:
    return _llama(dp, tp, pp, *settings, **{"model": MIXTURE, **changes})


LAYOUTS: dict[str, Case] = {
    "dp2": _gpt(2),
    "tp2": _gpt(1, 2),
    "tp2, sequence parallel, dropout": _gpt(1, 2, 1, SEQUENCE, dropout=0.1),
    "pp2, 1f1b": _gpt(1, 1, 2),
    "pp2, gpipe, untied": _gpt(1, 1, 2, schedule="gpipe", tie=False),
    "pp2 tp2, interleaved": _gpt(1, 2, 2, schedule="interleaved"),
    "pp2, looped-bfs": _gpt(1, 1, 2, schedule="looped-bfs"),
    "pp2, zero-bubble": _gpt(1, 1, 2, schedule="zero-bubble"),
    "pp2 dp2, zbv": _gpt(2, 1, 2, schedule="zbv", accumulation=4),
    "pp2, dualpipev": _gpt(1, 1, 2, schedule="dualpipev", accumulation=4),
    "cp2, all-gather": _gpt(cp=2),
    "cp3, ring": _gpt(1, 1, 1, ("parallel.cp_method", "ring"), cp=3),
    "dp3, ZeRO 1": _gpt(3, 1, 1, ("parallel.zero", 1)),
    "dp2 tp2, ZeRO 2, untied, bf16": _gpt(2, 2, 1, ("parallel.zero", 2), tie=False, dtype="bf16"),
    "dp2 pp2, ZeRO 3": _gpt(2, 1, 2, ("parallel.zero", 3), schedule="gpipe", accumulation=4),
    "dp4, ZeRO 1 of two copies": _gpt(4, 1, 1, ("parallel.zero", 1), ("parallel.zero_shards", 2)),
    "dp2 cp2, compressed": _gpt(2, 1, 1, ("parallel.gradient_compression", "bf16"), cp=2),
    "dp2 tp2 pp2, sequence parallel, recompute": _gpt(2, 2, 2, SEQUENCE, ("train.recompute", "full"), dtype="fp64"),
    "tp2 cp2, selective recompute, fp16": _gpt(1, 2, 1, ("train.recompute", "selective"), cp=2, dtype="fp16"),
    "tp2 pp2, chunked loss": _gpt(1, 2, 2, ("train.loss_chunk_size", 5)),
    "Llama, dp2 tp2 cp2, sequence parallel": _llama(2, 2, 1, SEQUENCE, cp=2),
    "Llama, tp2 pp2, tied, ZeRO 1": _llama(2, 2, 2, ("parallel.zero", 1), tie=True, schedule="interleaved"),
    "mixture, ep2": _mixture(2, 1, 1, ("parallel.ep", 2)),
    "mixture, ep2 dp4 tp2, sequence parallel, ZeRO 3": _mixture(
        4, 2, 1, SEQUENCE, ("parallel.ep", 2), ("parallel.zero", 3)
    ),
    "mixture, ep2 pp2 cp2, zero-bubble": _mixture(2, 1, 2, ("parallel.ep", 2), schedule="zero-bubble", cp=2),
}


def record(case: Case) -> list[str]:
    """Return the collectives of this rank in the first step."""
    engine = make_engine(case)
    with engine.mesh.recorder.recording() as events:
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    return names_of(events)


def names_of(events: Iterable[Event]) -> list[str]:
    return [f"{event.axis} {event.operation} {event.nbytes}" for event in events]


def read() -> dict[str, Sequences]:
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: [list(_unfold(layout["sequences"][index])) for index in layout["ranks"]] for name, layout in kept.items()
    }


def write(layouts: dict[str, Sequences]) -> None:
    """Write the golden file; ranks with equal collectives share a sequence."""
    lines = []
    for name, ranks in layouts.items():
        different = [list(each) for each in dict.fromkeys(map(tuple, ranks))]
        indices = [different.index(rank) for rank in ranks]
        sequences = ",\n".join("  " + json.dumps(_fold(sequence)) for sequence in different)
        lines.append(f'{json.dumps(name)}: {{"ranks": {json.dumps(indices)}, "sequences": [\n{sequences}]}}')
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def first_difference(got: Sequences, expected: Sequences) -> str | None:
    """Describe the first collective in which a rank differs; return None if there is none."""
    if len(got) != len(expected):
        return f"{len(got)} ranks instead of {len(expected)}"
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for place, (one, other) in enumerate(zip_longest(mine, theirs, fillvalue="nothing")):
            if one != other:
                before = f" after {mine[place - 1]}" if place else ""
                return f"rank {rank}, collective {place}{before}: {one} instead of {other}"
    return None


def _fold(events: Sequence[str]) -> list[str]:
    """Replace equal neighbours by one of them with a count before it."""
    runs = [(event, len(list(equal))) for event, equal in groupby(events)]
    return [f"{count}x {event}" if count > 1 else event for event, count in runs]


def _unfold(folded: Sequence[str]) -> Iterator[str]:
    for each in folded:
        count, times, event = each.partition("x ")
        yield from [event] * int(count) if times and count.isdecimal() else [each]


if __name__ == "__main__":
    from threefold.verify.worker_pool import WorkerPool

    with WorkerPool(8) as pool:
        write({name: pool.run(case.world_size, record, case) for name, case in LAYOUTS.items()})
