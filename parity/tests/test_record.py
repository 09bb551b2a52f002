"""Records that are damaged, cut, of another model or of other steps: one sentence each."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_support import rewrite, rewrite_index
from torch import Tensor, nn

import threefold_parity as parity
from threefold_parity.compare import compare
from threefold_parity.files import checksum
from threefold_parity.placement import whole
from threefold_parity.record import GRADIENT, Page, Record, page_file, write_facts
from threefold_parity.text import UserError


def record(folder: Path, model: nn.Module, steps: int = 2) -> Path:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    recorder = parity.Recorder(model, folder=folder, steps=steps)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        recorder.after_backward()
        recorder.after_update()
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("good") / "record", nn.Linear(3, 4))


def test_a_good_record_equals_itself(good: Path) -> None:
    assert compare(Record(good), Record(good)).equal


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "There is no record at"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], "is empty: no run recorded there"),
    (lambda folder: (folder / "rank-00000.json").unlink(), r"has no rank-00000\.json"),
    (lambda folder: cut(folder / "rank-00000.json"), "rank-00000"),
    (lambda folder: (folder / "rank-00000.json").write_text("[1]"), r"damaged: rank-00000\.json"),
    (lambda folder: rewrite(folder, version=7), "has version 7, and this program reads version 1"),
    (lambda folder: rewrite(folder, world_size=3), "is of 3 ranks but lacks rank 1 and 1 more"),
    (lambda folder: rewrite(folder, world_size=0), r"damaged: rank-00000\.json .* \(its world_size is 0\)"),
    (
        lambda folder: rewrite(folder, world_size=10**9),
        "is of 1,000,000,000 ranks but lacks rank 1 and 999,999,998 more",
    ),
    (lambda folder: rewrite(folder, world_size=True), r"\(its world_size is true\)"),
    (lambda folder: rewrite(folder, steps=-1), r"\(its steps is -1\)"),
    (lambda folder: rewrite(folder, steps=10**9), r"\(its checksums is "),
    (lambda folder: rewrite(folder, rank=1), r"\(its rank is 1\)"),
    (lambda folder: rewrite(folder, numbers={"1": {"scalars": {"loss": "much"}}}), r"\(its numbers is "),
    (lambda folder: rewrite(folder, numbers={}), r"\(its numbers is \{\}\)"),
    (lambda folder: rewrite(folder, versions=None), r"\(its versions is null\)"),
    (lambda folder: rewrite(folder, without=("checksums",)), r"\(it has no checksums\)"),
    (lambda folder: rewrite(folder, weight_dtypes={"weight": "float33"}), r"\(its weight_dtypes is "),
    (lambda folder: rewrite_index(folder, shape=[10**12, 1]), "damaged: rank-00000-step-0000"),
    (lambda folder: rewrite_index(folder, start=[3, 0], size=[9, 3]), "damaged: rank-00000-step-0000"),
    (lambda folder: rewrite_index(folder, order="first"), "damaged: rank-00000-step-0000"),
    (lambda folder: rewrite(folder, steps=1), r"is cut: rank 0 recorded 1 of 2 steps; .* --steps 1"),
    (lambda folder: cut(folder / "rank-00000-step-0001.safetensors"), "damaged: rank-00000-step-0001"),
    (lambda folder: (folder / "rank-00000-step-0002.safetensors").unlink(), "lacks step 2 of rank 0"),
    (lambda folder: (folder / "rank-00000-step-0000.safetensors").write_bytes(b""), "damaged: rank-00000-step-0000"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=[problem for _, problem in DAMAGES])
def test_damage_is_one_sentence(good: Path, tmp_path: Path, damage: Callable[[Path], object], problem: str) -> None:
    folder = tmp_path / "record"
    shutil.copytree(good, folder)
    damage(folder)
    with pytest.raises(UserError, match=problem) as caught:
        compare(Record(good), Record(folder))
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_in_the_values_is_refused(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    shutil.copytree(good, folder)
    path = folder / "rank-00000-step-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged: rank-00000-step-0001"):
        compare(Record(good), Record(folder))


def test_another_model_is_refused(good: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other", nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(UserError, match=r"of another model than .*: it lacks bias \(3 more names differ\)"):
        compare(Record(good), Record(other))
    wider = record(tmp_path / "wider", nn.Linear(3, 5))
    with pytest.raises(UserError, match=r"bias has the shape \(5,\) instead of \(4,\)|weight has the shape"):
        compare(Record(good), Record(wider))


def test_other_steps_are_refused(good: Path, tmp_path: Path) -> None:
    longer = record(tmp_path / "longer", nn.Linear(3, 4), steps=3)
    with pytest.raises(UserError, match=r"The records have 2 and 3 steps; compare what both have with --steps 2\."):
        compare(Record(good), Record(longer))
    assert compare(Record(good), Record(longer), steps=2).steps == 2
    with pytest.raises(UserError, match=r"--steps 5 but the records have 2 in common; use 2\."):
        compare(Record(good), Record(longer), steps=5)


def test_a_run_without_noise_teaches_no_tolerance(good: Path) -> None:
    with pytest.raises(UserError, match="is a run without noise, so that it shows no rounding"):
        compare(Record(good), Record(good), [Record(good)])


def test_missing_pieces_are_refused(good: Path, tmp_path: Path) -> None:
    """As when an adapter says of a rank's half that it is half of the whole, and the other rank is not there."""

    def half(what: str, name: str, tensor: torch.Tensor) -> parity.Placement | None:
        return parity.shard(tensor, 0, 0, 2) if what == "parameter" else None

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    recorder = parity.Recorder(model, adapter=half, folder=tmp_path / "half", steps=2)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        recorder.after_backward()
        recorder.after_update()
    with pytest.raises(UserError, match=r"has 2 elements of bias, and 2 are missing|has 6 elements of weight"):
        compare(Record(good), Record(tmp_path / "half"))
    with pytest.raises(UserError, match=r"elements of .*, and .* are missing"):
        compare(Record(tmp_path / "half"), Record(tmp_path / "half"))


OWN_MEMBERS = ("format", "version", "rank", "checksum")
"""Facts that `write_facts` adds."""


def write_partial(folder: Path, world: int, like: Path) -> Tensor:
    """A record of a gradient of which each rank has a summand; returns the sum."""
    total = torch.zeros(3, 4)
    folder.mkdir()
    for rank in range(world):
        summand = torch.arange(12.0).view(3, 4) * (rank + 1)
        total += summand
        page = Page()
        page.add(GRADIENT, "weight", summand, replace(whole(summand), partial=True))
        page.save(folder / page_file(rank, 1))
        known = ["", checksum(folder / page_file(rank, 1))]
        facts = json.loads((like / "rank-00000.json").read_text())
        numbers = {"1": facts["numbers"]["1"]}
        facts |= {"world_size": world, "steps": 1, "planned_steps": 1, "numbers": numbers, "checksums": known}
        write_facts(folder, rank, {name: value for name, value in facts.items() if name not in OWN_MEMBERS})
    return total


def test_summands_of_ranks_are_added_and_are_no_copies(good: Path, tmp_path: Path) -> None:
    total = write_partial(tmp_path / "record", 3, good)
    [found] = Record(tmp_path / "record").step(1).values()
    assert torch.equal(found.kept.elements, total.double())
    assert (found.missing, found.copies, len(found.owners)) == (0, [], 3)
