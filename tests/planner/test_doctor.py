"""The pieces of an examination: what is said of machines, the entry that follows from rates, interfaces and GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.planner.block import block_shapes, describe_model
from threefold.planner.doctor import (
    NCCL,
    Collective,
    DiskSpeed,
    Examination,
    Machine,
    RankRates,
    findings_of,
    fitted_collective,
    half_depth,
    measure_disk,
    measured_entry,
    measured_link,
    tiny_config,
)
from threefold.planner.hardware import as_yaml, build, read_entries
from threefold.planner.layer_cost import block_seconds, cost_block
from threefold.planner.systems import SYSTEMS

MACHINE = Machine(
    host="here",
    address="10.0.0.2",
    system="Linux",
    processor="A processor, 4 cores",
    cores=4,
    machine_cores=8,
    quota=0.0,
    memory=16 * 10**9,
    shared_memory=8 * 10**9,
    load=0.1,
    compiler="/usr/bin/g++",
    gpus=0,
    versions={"torch": "2.13.0"},
    backends=("gloo", "nccl"),
)
DISK = DiskSpeed("/runs", 1e9, 10**12)


def rates_of(ranks: int, fp32: float = 1e9, depth: float = 100.0, transport: str = "shared memory") -> RankRates:
    """Ranks whose products reach half of `fp32` at `depth`, whose attention reaches a half and a quarter of it, half of
    these at 200 positions and at heads of 16, and whose ring has 4 GB/s and 5 µs."""
    matrix = {size: fp32 * size / (size + depth) for size in (64, 128, 256, 512, 1024)}
    collectives = {}
    for name, group in (("all_reduce", ranks), ("pairs", 2)):
        latency = 2 * 5e-6 * ({2: 1, 4: 2, 8: 3}.get(group, 1) if transport == NCCL else 1)
        seconds = latency + 2 * (group - 1) / group * (1 << 20) / 4e9
        collectives[name] = Collective(latency, (1 << 20) / max(seconds - latency, 1e-9), transport)
    attention = []
    for positions, width in ((128, 32), (128, 128), (1024, 128)):
        share = fp32 * positions / (positions + 200) * width / (width + 16)
        rates = {"forward": share / 2, "backward": share / 4}
        attention.append({"positions": positions, "head_dim": width, **rates})
    found = collectives if ranks > 1 else {}
    return RankRates(ranks, 1, {"fp32": matrix, "bf16": {64: 1.0}}, {"fp32": attention}, 2e9, 1e-5, collectives=found)


def said(machine: Machine = MACHINE, device: str = "cpu", disk: DiskSpeed = DISK, ranks: int = 4) -> str:
    found = findings_of(machine, device, [rates_of(ranks)], disk)
    return "\n".join(f"{finding.text}: {finding.remedy}." for finding in found)


def test_a_sound_machine_has_no_findings_of_its_host() -> None:
    (only,) = findings_of(MACHINE, "cpu", [rates_of(4)], DISK)
    assert (only.severity, only.text) == ("warning", "bf16 products reach 0% of the rate of fp32 here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cores": 2}, "4 ranks share 2 cores"),
        ({"compiler": ""}, "there is no C compiler, which train.compile needs: install one"),
        ({"shared_memory": 1 << 20}, "/dev/shm has 1.0 MB to write"),
        ({"quota": 1.5}, "allows 1.5 cores' worth of time, on 8 cores"),
        ({"load": 7.0}, "keep 7.0 processes busy on 4 cores"),
        ({"backends": ()}, "has no gloo"),
        ({"gpus": 2}, "torch can use none of the 2 GPUs"),
        ({"address": "127.0.1.1"}, "the name here resolves to 127.0.1.1"),
    ],
)
def test_what_is_wrong_with_a_host(changes: dict[str, object], words: str) -> None:
    assert words not in said()
    assert words in said(replace(MACHINE, **changes))  # type: ignore[arg-type]


def test_a_slow_disk_and_the_worst_first() -> None:
    found = list(findings_of(replace(MACHINE, backends=(), compiler=""), "cpu", [], DiskSpeed("/runs", 20e6, 10**12)))
    assert [finding.severity for finding in found] == ["error", "warning", "note"]
    assert "takes 20.0 MB/s" in found[1].text


def test_the_entry_of_measured_rates(tmp_path: Path) -> None:
    found = Examination(MACHINE, "cpu", (rates_of(1), rates_of(8)), DISK, ())
    entry = measured_entry(found)
    assert entry is not None
    assert (entry.name, entry.title, entry.gpus_per_node) == ("this-machine", "A processor, 4 cores", 8)
    assert entry.matrix_rates["fp32"] == pytest.approx(1e9)
    assert entry.achievable.matrix_depth == pytest.approx(100.0)
    reached = entry.achievable
    assert (reached.attention, reached.attention_backward) == pytest.approx((0.5, 0.25))
    assert (reached.attention_length, reached.attention_depth) == pytest.approx((200.0, 16.0))
    assert entry.inside.bandwidth == pytest.approx(4e9)
    assert entry.inside.latency == pytest.approx(5e-6)
    assert entry.memory_bytes == 2 * 10**9
    path = tmp_path / "entry.yaml"
    path.write_text(as_yaml(entry))
    assert build("this-machine", read_entries(path), "entry") == entry
    assert measured_entry(replace(found, rates=())) is None


def test_rates_that_do_not_grow_and_one_rank_alone() -> None:
    assert half_depth({256: 2e9, 512: 1e9}) == 0.0
    assert half_depth({64: 1e9}) == 0.0
    assert measured_link(rates_of(1)).bandwidth == 1e9
    assert measured_link(rates_of(8, transport=NCCL)).latency == pytest.approx(5e-6), "of trees"


def test_noise_makes_no_link_faster_than_memory() -> None:
    assert fitted_collective(1e-3, 1.1e-3, 3.1e-3, 10**6, 1e10, "gloo") == Collective(
        pytest.approx(1e-4), pytest.approx(5e8), "gloo"
    )
    for large in (1.1e-3, 0.9e-3):  # as fast as the small message, or faster than the product alone
        assert fitted_collective(1e-3, 1.1e-3, large, 10**6, 1e10, "gloo").bandwidth == pytest.approx(1e10)


def test_this_machine_and_its_disk(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.cores >= 1
    assert machine.memory > 1 << 28
    assert "gloo" in machine.backends
    assert machine.versions["torch"].startswith("2.")
    found = measure_disk(tmp_path, 4 << 20)
    assert found.bandwidth > 0
    assert found.free > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written: No such file"):
        measure_disk(tmp_path / "absent", 4 << 20)


def test_host_work_is_what_kernels_do_not_explain() -> None:
    without, with_block = (
        Examination(MACHINE, "cpu", (replace(rates_of(8), block=block),), DISK, ()) for block in (0.0, 5e-2)
    )
    before, entry = measured_entry(without), measured_entry(with_block)
    assert before is not None
    assert entry is not None
    block = block_shapes(describe_model(tiny_config().model, tiny_config().data.sequence_length))[0]
    system = SYSTEMS["own-cpu"]
    kernels = block_seconds(cost_block(tiny_config(), block, 1, system), before, system).total
    assert before.achievable.block == 0.0 < kernels < 5e-2
    assert entry.achievable.block == pytest.approx(5e-2 - kernels)
    rates = replace(rates_of(8), block=5e-2, sharded_block=8e-2, tensor_block=7e-2, context_block=4e-2)
    found = measured_entry(Examination(MACHINE, "cpu", (rates,), DISK, ()))
    assert found is not None
    reached = found.achievable
    longer = reached.sharded_block, reached.tensor_block, reached.context_block
    assert longer == pytest.approx((3e-2, 2e-2, 0.0)), "which is never less than nothing"
