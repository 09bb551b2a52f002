"""Runs that meet at one address: neither replaces copies of the other, nor continues from them."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.remotes import address_of, content, looked
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import path_of
from threefold.data.dataset import open_dataset
from threefold.errors import UserError
from threefold.resilience.ownership import OWNER_FILE, Claimant, Owner, terms_of
from threefold.resilience.remote import AddressTaken, RemoteCheckpoints, look_at_remote
from threefold.resilience.remote_copier import claim_address
from threefold.verify.worker_pool import WorkerError, WorkerPool

TERMS = {"optimizer.lr": "0.001", "train.seed": "1"}
KINDS = pytest.mark.parametrize("kind", ["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])


def claimant(run: Path, resumes: bool = False, **changes: str) -> Claimant:
    run.mkdir(parents=True, exist_ok=True)
    return Claimant(run, resumes, {**TERMS, **{key.replace("__", "."): value for key, value in changes.items()}})


def everything(remote: RemoteCheckpoints) -> dict[str, bytes]:
    return {path: remote._files.cat_file(path) for path in remote._files.find(remote._root)}


@KINDS
def test_a_second_run_is_refused_and_changes_nothing(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_of(kind, tmp_path, request, monkeypatch)
    first, lines = claim_address(address, claimant(tmp_path / "first"))
    assert lines == []
    second = tmp_path / "second"
    for copies in range(2):
        before = everything(first)
        assert len(before) == (1 if copies == 0 else len(content(path_of(trained, 1))) + 1)
        for run, reason in (
            (claimant(second), "another run than this one"),
            (claimant(second, True, optimizer__lr="0.003"), "with optimizer.lr 0.001 where this run has 0.003"),
        ):
            for use in (claim_address, look_at_remote):
                with pytest.raises(
                    AddressTaken, match=rf"which belongs to the run in .*/first on host .*{reason}; give"
                ):
                    use(address, run)
        assert everything(first) == before
        assert list(second.iterdir()) == []
        first.upload(path_of(trained, 1))
    shutil.copytree(path_of(trained, 2), path_of(second, 2))  # with equal settings, but another run from the start
    with pytest.raises(AddressTaken, match=r"and .*/second has the checkpoints of another run; give each run an"):
        looked(address, second, True)


@KINDS
def test_a_run_continues_elsewhere_and_here_again(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder with the same settings; the process that it was taken from notices and writes nothing."""
    address = address_of(kind, tmp_path, request, monkeypatch)
    first, _ = claim_address(address, claimant(tmp_path / "first"))
    first.upload(path_of(trained, 1))
    elsewhere = claimant(tmp_path / "elsewhere", True)
    assert look_at_remote(address, elsewhere).copy == path_of(tmp_path / "elsewhere", 1)
    second, (line,) = claim_address(address, elsewhere)
    assert line.startswith(f"checkpoint.remote {address} is this run's from here on; it was that of the run in ")
    before = everything(second)
    for write in (
        lambda: first.upload(path_of(trained, 2)),
        lambda: first.upload(path_of(trained, 1)),
        lambda: first.prune(1, None, 9),
        lambda: first.remove(1),
    ):
        with pytest.raises(AddressTaken, match=r"belongs to the run in .*/elsewhere on host .* so this process leaves"):
            write()
        assert everything(second) == before
    second.upload(path_of(trained, 2))
    claim_address(address, claimant(tmp_path / "first", True))
    third, _ = claim_address(address, claimant(tmp_path / "first", True, optimizer__lr="0.5"))  # its own, changed
    third.upload(path_of(trained, 3))
    assert third.steps() == [1, 2, 3]
    runs = [Owner.of_folder(tmp_path / name) for name in ("first", "elsewhere")]
    assert all(runs)
    assert len({each.run for each in runs if each}) == 1


def test_a_folder_that_was_moved_or_copied(trained: Path, tmp_path: Path) -> None:
    """It may go on as it was; a copy with other settings is a branch of the run, with an address of its own."""
    address, run = f"file://{tmp_path / 'there'}", tmp_path / "run"
    claim_address(address, claimant(run))
    shutil.copytree(run, tmp_path / "branch")
    with pytest.raises(AddressTaken, match=r"with optimizer\.lr 0\.001 where this run has 0\.5"):
        claim_address(address, claimant(tmp_path / "branch", True, optimizer__lr="0.5"))
    run.rename(tmp_path / "moved")
    claim_address(address, claimant(tmp_path / "moved", True))
    claim_address(address, claimant(tmp_path / "moved", True, optimizer__lr="0.5"))


def test_a_folder_that_was_removed_before_the_first_checkpoint_begins_again(trained: Path, tmp_path: Path) -> None:
    address, run = f"file://{tmp_path / 'there'}", tmp_path / "run"
    claim_address(address, claimant(run))
    shutil.rmtree(run)
    remote, _ = claim_address(address, claimant(run, optimizer__lr="0.5"))
    remote.upload(path_of(trained, 1))
    shutil.rmtree(run)
    with pytest.raises(AddressTaken, match="another run than this one"):
        claim_address(address, claimant(run, optimizer__lr="0.5"))


def test_an_address_is_handed_over_by_removing_the_record(trained: Path, tmp_path: Path) -> None:
    """While its run goes on, that run copies nothing more; half a record is nobody's."""
    address, record = f"file://{tmp_path / 'there'}", tmp_path / "there" / OWNER_FILE
    first, _ = claim_address(address, claimant(tmp_path / "first"))
    whole = record.read_text()
    record.write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"there/owner\.json is not as a run wrote it; remove it if no other run"):
        claim_address(address, claimant(tmp_path / "first"))
    record.unlink()
    with pytest.raises(AddressTaken, match=r"owner\.json is gone, so checkpoint\.remote is no longer this run's"):
        first.upload(path_of(trained, 1))
    second, _ = claim_address(address, claimant(tmp_path / "second", True, optimizer__lr="0.5"))
    second.upload(path_of(trained, 1))


def test_everything_that_decides_the_results_is_compared(small_run: Run) -> None:
    def terms(run: Run) -> dict[str, str]:
        return terms_of(run.config, open_dataset(run.config))

    run = small_run.but(steps=4)
    same = [
        run.but(tp=2),
        run.but(set=(("checkpoint.every", 7), ("log.every", 3), ("train.timeout", 9.0))),
        run.but(set=(("train.callbacks", ["csv_log"]),)),
    ]
    assert all(terms(each) == terms(run) for each in same)
    changed = {
        "optimizer.weight_decay": run.but(set=(("optimizer.weight_decay", 0.5),)),
        "train.seed": run.but(set=(("train.seed", 7),)),
        "train.max_steps": run.but(steps=5),
        "train.init_from": run.but(set=(("train.init_from", "runs/other"),)),
        "model.initializer_range": run.but(set=(("model.initializer_range", 0.5),)),
        "optimizer.clip_grad_norm": run.but(set=(("optimizer.clip_grad_norm", 0.5),)),
        "precision.dtype": run.but(dtype="fp64"),
    }
    for key, other in changed.items():
        now, then = terms(other), terms(run)
        assert now.keys() == then.keys()
        assert [name for name in then if now[name] != then[name]] == [key]


def test_two_runs_of_a_sweep_on_their_ranks(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """The second one is refused on each rank before its first step."""
    there = tmp_path / "there"
    settings = (("checkpoint.every", 2), ("checkpoint.remote", f"file://{there}"))
    run = small_run.but(dp=2, steps=4, set=settings)
    pool.run(2, train_rank, run, tmp_path / "first")
    before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    other = run.but(set=(*settings, ("optimizer.lr", 0.5)))
    for resumes in (False, "auto"):
        with pytest.raises(WorkerError, match=r"checkpoint\.remote is .* which belongs to the run in .*/first on host"):
            pool.run(2, train_rank, other.but(steps=6), tmp_path / "second", resumes)
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before
    assert not list((tmp_path / "second").glob("checkpoints/step_*"))
