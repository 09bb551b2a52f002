"""Copies of checkpoints at addresses of `fsspec`: in memory, in a folder, and on a server that speaks S3."""

import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.remotes import address_of, content, looked
from tests.support.damage import flip
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, train_rank
from threefold.checkpoint.folder import complete, path_of
from threefold.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from threefold.errors import UserError
from threefold.resilience.ownership import Claimant
from threefold.resilience.remote import RemoteCheckpoints, look_at_remote
from threefold.verify.worker_pool import WorkerPool


@sweep("kind", ["memory", "file", "s3"], quick=(0, 1))
def test_what_is_copied_comes_back(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch))
    assert remote.steps() == []
    for step in (1, 2, 3, 4, 4):  # the last one replaces itself
        remote.upload(path_of(trained, step))
    assert remote.steps() == [1, 2, 3, 4]
    remote.prune(1, 2, newest=3)
    assert remote.steps() == [2, 3, 4]
    assert looked(remote.address, tmp_path / "run", True) == path_of(tmp_path / "run", 4)
    assert content(path_of(tmp_path / "run", 4)) == content(path_of(trained, 4))
    assert looked(remote.address, tmp_path / "run", True) is None  # as new as there
    with pytest.raises(UserError, match="already has checkpoints; resume with --resume"):
        looked(remote.address, tmp_path / "run", False)
    remote.remove(4)
    assert remote.steps() == [2, 3]


@pytest.mark.parametrize("kind", ["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def test_none_is_listed_before_all_its_bytes_are_there(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose local folder loses a file on the way, after some of the others have been copied."""
    remote = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch))
    remote.upload(path_of(trained, 1))
    shutil.copytree(path_of(trained, 2), path_of(tmp_path, 2))
    last = sorted(path.name for path in path_of(tmp_path, 2).iterdir())[-1]
    (path_of(tmp_path, 2) / last).unlink()
    with pytest.raises(UserError, match=r"checkpoint\.remote is .* which cannot be written"):
        remote.upload(path_of(tmp_path, 2))
    assert remote.steps() == [1]
    remote.upload(path_of(trained, 3))
    remote.prune(0, None, newest=3)
    assert remote.steps() == [1, 3]


def test_a_damaged_copy_is_refused(trained: Path, tmp_path: Path) -> None:
    remote = RemoteCheckpoints(f"file://{tmp_path / 'there'}")
    remote.upload(path_of(trained, 4))
    file = tmp_path / "there" / "step_00000004" / "tensors-00001.bin"
    damaged = bytearray(file.read_bytes())
    damaged[100] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(UserError, match=r"step_00000004 is damaged: its tensors-00001\.bin does not have the checksum"):
        looked(remote.address, tmp_path / "run", True)
    assert complete(tmp_path / "run") == []


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_run_that_begins_anew_replaces_no_copy_that_is_damaged(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that resumes if it can begin anew where the newest copy has lost its manifest to damage."""
    remote, run = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch)), tmp_path / "run"
    remote.upload(path_of(trained, 2))
    manifest = f"{remote._root}/step_00000002/{MANIFEST}"
    remote._files.pipe_file(manifest, b"{")
    with pytest.raises(UserError, match="step_00000002 is not a complete checkpoint, and a run that begins anew would"):
        looked(remote.address, run, False)
    with pytest.raises(UserError, match=r"step_00000002 is damaged: its checkpoint\.json is not as it was written"):
        looked(remote.address, run, True)
    remote.upload(path_of(trained, 1))
    found = look_at_remote(remote.address, Claimant(run, True, {}))
    assert found.copy == path_of(run, 1)
    assert found.lines == (
        f"{remote.address}/step_00000002 (its checkpoint.json is not as it was written) was passed over; "
        f"{path_of(run, 1)} is used, the newest that is good.",
    )
    remote.remove(1)
    shutil.copytree(path_of(trained, 3), path_of(run, 3))
    assert looked(remote.address, run, True) is None  # a newer one is here
    shutil.rmtree(run)
    remote._files.rm_file(manifest)  # as where the upload was interrupted
    with pytest.raises(UserError, match="step_00000002 is not a complete checkpoint"):
        looked(remote.address, run, False)
    assert looked(remote.address, run, True) is None


@sweep("in_background", [False, True], quick=(0,))
def test_a_run_continues_from_there_on_an_empty_disk(
    pool: WorkerPool, small_run: Run, tmp_path: Path, in_background: bool
) -> None:
    settings = (
        ("checkpoint.every", 2),
        ("checkpoint.keep", 1),
        ("checkpoint.async_save", in_background),
        ("checkpoint.remote", f"file://{tmp_path / 'there'}"),
    )
    run = small_run.but(dp=2, steps=5, set=settings)
    pool.run(2, train_rank, run, tmp_path / "run")
    assert RemoteCheckpoints(f"file://{tmp_path / 'there'}").steps() == [5]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert looked(f"file://{tmp_path / 'there'}", tmp_path / "run", True) is not None
    longer = run.but(steps=8)
    pool.run(2, train_rank, longer, tmp_path / "run", True)
    pool.run(2, train_rank, longer.but(set=settings[:3]), tmp_path / "unbroken")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "unbroken")
    assert RemoteCheckpoints(f"file://{tmp_path / 'there'}").steps() == [8]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nothing://there", "cannot be opened: Protocol not known: nothing"),
        ("file:///proc/1/none", "cannot be written"),
    ],
)
def test_an_address_that_does_not_work_is_a_sentence(address: str, sentence: str, trained: Path) -> None:
    with pytest.raises(UserError, match=rf"checkpoint\.remote is {address}, which {sentence}"):
        RemoteCheckpoints(address).upload(path_of(trained, 4))


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_bucket_that_is_not_there_is_told_before_the_run_and_not_made(
    kind: str,
    resumes: bool,
    trained: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = f"/threefold-{uuid.uuid4()}"
    if kind == "s3":
        address_of(kind, tmp_path, request, monkeypatch)
        first = first[1:]
    remote = RemoteCheckpoints(f"{kind}://{first}/runs/one")
    with pytest.raises(UserError, match=f"but there is no {first}, which a run does not make; correct the address"):
        looked(remote.address, tmp_path / "run", resumes)
    with pytest.raises(UserError, match="which cannot be written"):  # nor by the first checkpoint
        remote.upload(path_of(trained, 4))
    assert not remote._files.exists(first)


@pytest.mark.parametrize("kind", ["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def test_the_trial_of_an_address_leaves_nothing(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch))
    assert looked(remote.address, tmp_path / "run", True) is None
    assert remote._files.find(remote._root) == []
    remote.upload(path_of(trained, 4))
    assert remote.steps() == [4]


def test_an_address_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    address = "file:///proc/1/none"
    with pytest.raises(UserError, match=f"{address}, which cannot be written: "):
        looked(address, tmp_path / "run", True)
    assert looked(address, tmp_path / "run", True, writes=False) is None  # a rank that is not the first


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("run", "which is the run's folder"),
        ("link/checkpoints", "which is the run's folder .*/run/checkpoints,"),
        ("run/copies", "which lies in the run's folder"),
        (".", "which contains the run's folder"),
        ("link/copies", "which lies in the run's folder"),
        ("elsewhere", "which is the run's folder .*/run/checkpoints,"),
    ],
)
def test_no_address_is_in_the_run_whose_checkpoints_it_would_replace(there: str, told: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    for address in (f"file://{tmp_path / there}", f"local://{tmp_path / there}"):
        with pytest.raises(UserError, match=told):
            looked(address, run, True)


def fail_after(changes: int, files: Any, patch: pytest.MonkeyPatch) -> None:
    """Let the changes of a file system fail from one of them on, as for a process that is killed there."""
    left = changes

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if not left:
                raise OSError("the process was killed")
            left -= 1
            return change(*arguments, **options)

        return counting

    for name in ("put_file", "pipe_file", "cp_file", "rm", "rm_file", "makedirs"):
        patch.setattr(files, name, counted(getattr(files, name)))


@pytest.mark.parametrize("kind", ["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_copy_that_is_replaced_stays_until_the_new_one_is_complete(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the process that replaces it is killed."""
    remote = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch))
    newer = Path(shutil.copytree(path_of(trained, 4), path_of(tmp_path / "newer", 4)))
    facts = read_manifest(newer).facts
    (newer / "notes.txt").write_text("another file\n")
    write_manifest(newer, facts)
    both, seen, is_whole = (content(path_of(trained, 4)), content(newer)), set[int](), False
    for changes in range(100):
        remote.remove(4)
        remote.upload(path_of(trained, 4))
        with monkeypatch.context() as patch, suppress(UserError):
            fail_after(changes, remote._files, patch)
            remote.upload(newer)
            is_whole = True
        found = content(remote.download(4, tmp_path / f"{kind}-{changes}"))
        assert found in both
        seen.add(both.index(found))
        if is_whole:
            break
    assert is_whole
    assert seen == {0, 1}
    assert found == both[1]
    assert remote._folders() == {4: ["step_00000004"]}


def lose_a_file(remote: RemoteCheckpoints, step: int) -> None:
    remote._files.rm_file(f"{remote._root}/{path_of(Path(), step).name}/tensors-00001.bin")


@pytest.mark.parametrize("kind", ["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def test_an_older_copy_is_used_where_the_newest_lacks_a_file(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, run = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch)), tmp_path / "run"
    for step in (2, 3, 4):
        remote.upload(path_of(trained, step))
    lose_a_file(remote, 4)
    found = look_at_remote(remote.address, Claimant(run, True, {}))
    assert found.copy == path_of(run, 3)
    assert found.lines == (
        f"{remote.address}/step_00000004 (its tensors-00001.bin is missing) was passed over; {path_of(run, 3)} is "
        "used, the newest that is good.",
    )
    shutil.rmtree(run)
    lose_a_file(remote, 3)
    remote.remove(2)
    with pytest.raises(UserError, match=r"step_00000004 \(its tensors-00001.bin is missing\) and .*step_00000003 \("):
        looked(remote.address, run, True)
    remote.remove(3)
    with pytest.raises(UserError, match=r"step_00000004 is damaged: its tensors-00001.bin is missing; remove it\.$"):
        looked(remote.address, run, True)


@pytest.mark.parametrize("name", ["tensors-00001.bin", "config.yaml"])
def test_a_good_copy_replaces_a_damaged_checkpoint(
    name: str, pool: WorkerPool, small_run: Run, trained: Path, tmp_path: Path
) -> None:
    """Damage that shows before the run, or only while its tensors are loaded; the newest good copy is an older one."""
    run, remote = Path(shutil.copytree(trained, tmp_path / "run")), RemoteCheckpoints(f"file://{tmp_path / 'there'}")
    for step in (2, 3, 4):
        remote.upload(path_of(trained, step))
    lose_a_file(remote, 4)
    for step in (3, 4):
        flip(file := path_of(run, step) / name, 4 * file.stat().st_size)
    settings = small_run.but(dp=2, steps=5, set=(("checkpoint.remote", remote.address), ("checkpoint.keep", 0)))
    before = look_at_remote(remote.address, Claimant(run, True, {}))
    assert before.copy == (None if name == "tensors-00001.bin" else path_of(run, 3))
    (printed, _) = pool.run(2, train_rank, settings, run, True)
    assert f"Resuming from {path_of(run, 3)}" in printed
    if name == "tensors-00001.bin":
        assert "step_00000004 (its tensors-00001.bin is missing) was passed over" in printed
        assert f"{path_of(run, 3)} was damaged (its tensors-00001.bin" in printed
        assert f"its copy at {remote.address} has replaced it." in printed
    assert content(path_of(run, 3)) == content(path_of(trained, 3))


def test_a_good_copy_replaces_a_damaged_last_checkpoint(trained: Path, tmp_path: Path) -> None:
    """Which nothing loads, as no step is left."""
    run, remote = Path(shutil.copytree(trained, tmp_path / "run")), RemoteCheckpoints(f"file://{tmp_path / 'there'}")
    remote.upload(path_of(trained, 4))
    flip(file := path_of(run, 4) / "tensors-00001.bin", 4 * file.stat().st_size)
    assert look_at_remote(remote.address, Claimant(run, True, {}), last=5).copy is None
    assert look_at_remote(remote.address, Claimant(run, True, {}), last=4).copy == path_of(run, 4)
    assert content(path_of(run, 4)) == content(path_of(trained, 4))


@pytest.mark.parametrize("there", ["other", "other/checkpoints", "link/copies"])
def test_no_address_is_in_another_run(there: str, trained: Path, tmp_path: Path) -> None:
    """Whose checkpoints would be taken for copies, and deleted as `checkpoint.keep` says."""
    other = tmp_path / "other"
    shutil.copytree(trained / "checkpoints", other / "checkpoints")
    (other / "config.yaml").write_text("# as a run writes it\n")
    (tmp_path / "link").symlink_to(other / "checkpoints")
    with pytest.raises(UserError, match=rf"which is the folder of the run {other} or lies among its checkpoints"):
        looked(f"file://{tmp_path / there}", tmp_path / "run", True)
    assert looked(f"file://{other}/copies", tmp_path / "run", True) is None
