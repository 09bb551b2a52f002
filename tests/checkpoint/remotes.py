"""Addresses for copies of checkpoints: in memory, in a folder, and on a server that speaks S3."""

import uuid
from pathlib import Path

import pytest

from threefold.resilience.ownership import Claimant
from threefold.resilience.remote import look_at_remote


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


def looked(address: str, run_dir: Path, resumes: bool, writes: bool = True) -> Path | None:
    return look_at_remote(address, Claimant(run_dir, resumes, {}), writes).copy


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
