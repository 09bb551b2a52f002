"""Copies of checkpoints at addresses of `fsspec`: in memory, in a folder, and on a server that speaks S3."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, train_rank
from threefold.checkpoint.folder import complete, path_of
from threefold.checkpoint.manifest import MANIFEST
from threefold.checkpoint.remote import RemoteCheckpoints, look_at_remote
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after steps 1 to 4."""
    folder = tmp_path_factory.mktemp("trained")
    settings = (("checkpoint.every", 1), ("checkpoint.keep", 0))
    pool.run(2, train_rank, small_run.but(dp=2, set=settings), folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that speaks S3, on this machine."""
    pytest.importorskip("s3fs", reason="s3fs is not installed, so no S3 server is tested")
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed, so no S3 server is tested")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    try:
        running.start()
    except OSError as error:
        pytest.skip(f"no server can be started here ({error})")
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def address_of(kind: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty address of its own."""
    if kind == "file":
        return f"file://{folder / 'there'}"
    if kind == "memory":
        return f"memory://{uuid.uuid4()}/run"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("server"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    bucket = f"bucket-{uuid.uuid4()}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/runs/one"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
    assert look_at_remote(remote.address, tmp_path / "run", True) == path_of(tmp_path / "run", 4)
    assert content(path_of(tmp_path / "run", 4)) == content(path_of(trained, 4))
    assert look_at_remote(remote.address, tmp_path / "run", True) is None  # as new as there
    with pytest.raises(UserError, match="already has checkpoints; resume with --resume"):
        look_at_remote(remote.address, tmp_path / "run", False)
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
        look_at_remote(remote.address, tmp_path / "run", True)
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
        look_at_remote(remote.address, run, False)
    with pytest.raises(UserError, match=r"step_00000002 is damaged: its checkpoint\.json is not as it was written"):
        look_at_remote(remote.address, run, True)
    remote.upload(path_of(trained, 1))
    with pytest.raises(UserError, match="step_00000002 is damaged"):  # not silently from the older one
        look_at_remote(remote.address, run, True)
    remote.remove(1)
    shutil.copytree(path_of(trained, 3), path_of(run, 3))
    assert look_at_remote(remote.address, run, True) is None  # a newer one is here
    shutil.rmtree(run)
    remote._files.rm_file(manifest)  # as where the upload was interrupted
    with pytest.raises(UserError, match="step_00000002 is not a complete checkpoint"):
        look_at_remote(remote.address, run, False)
    assert look_at_remote(remote.address, run, True) is None


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
    assert look_at_remote(f"file://{tmp_path / 'there'}", tmp_path / "run", True) is not None
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
        look_at_remote(remote.address, tmp_path / "run", resumes)
    with pytest.raises(UserError, match="which cannot be written"):  # nor by the first checkpoint
        remote.upload(path_of(trained, 4))
    assert not remote._files.exists(first)


@pytest.mark.parametrize("kind", ["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def test_the_trial_of_an_address_leaves_nothing(
    kind: str, trained: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(address_of(kind, tmp_path, request, monkeypatch))
    assert look_at_remote(remote.address, tmp_path / "run", True) is None
    assert remote._files.find(remote._root) == []
    remote.upload(path_of(trained, 4))
    assert remote.steps() == [4]


def test_an_address_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    address = "file:///proc/1/none"
    with pytest.raises(UserError, match=f"{address}, which cannot be written: "):
        look_at_remote(address, tmp_path / "run", True)
    assert look_at_remote(address, tmp_path / "run", True, writes=False) is None  # a rank that is not the first


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
            look_at_remote(address, run, True)
