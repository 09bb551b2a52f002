"""Passwords, tokens and signatures in addresses: in no file that a command writes, and in no byte that it prints."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.runs import write_config
from tests.support import ready
from threefold.config import load_config
from threefold.errors import UserError
from threefold.files import describe_error, hide_secrets, on_one_line, shown, without_secrets
from threefold.launch.failure import formatted, from_exception

SECRET = "hunter2xyz"
WITH_PASSWORD = f"memory://user:{SECRET}@host/x"
ADDRESSES = (
    WITH_PASSWORD,
    f"s3://user:a@b/{SECRET}@bucket/run",
    f"https://account.example/run?sv=1&sig={SECRET}%3D",
    f"s3://bucket/run?X-Amz-Signature={SECRET}",
    f"https://{SECRET}@host/run",
    f"https://host/run#access_token={SECRET}",
    f"zip://inner::https://user:{SECRET}@host/all.zip",
    f"s3://user:two {SECRET}@bucket/run",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_gives_access_is_hidden_in_messages(address: str) -> None:
    for text in (address, str(Path(address)), f"Cannot open {address!r}, which fails.", f'{{"path": "{address}"}}'):
        hidden = hide_secrets(text)
        assert SECRET not in hidden + shown(text) + on_one_line(text)
        assert hide_secrets(hidden) == hidden != text
    assert hide_secrets(without_secrets(address)) == without_secrets(address)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run",
        "sftp://user@host/run",
        "abfs://container@account.dfs.core.windows.net/run",
        "http://localhost:5000/api",
        "hf://datasets/user/data@revision/part",
        "file:///mnt/run",
        "sqlite:///runs.db",
        "see https://host/page.html#part, or ask a@b",
    ],
)
def test_an_address_without_a_secret_is_shown_whole(text: str) -> None:
    assert hide_secrets(text) == without_secrets(text) == text


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_setting_takes_a_secret(address: str, tmp_path: Path, tokens: Path) -> None:
    config = write_config(tmp_path, tokens)
    for setting, value in (
        ("checkpoint.remote", address),
        ("data.path", address),
        ("data.tokenizer", address),
        ("data.mixture", {address: 1}),
        ("train.callbacks", [{"name": "mlflow", "tracking_uri": address}]),
        ("train.callbacks", [{"name": "own.py:Mine", "places": {"first": [address]}}]),
        ("train.callbacks", [{"name": "wandb", "settings": {"api_key": SECRET}}]),
    ):
        with pytest.raises(UserError, match=f"{setting} .* but .*must be") as error:
            load_config(config, {setting: value} | ({"data.path": None} if setting == "data.mixture" else {}))
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (f"checkpoint.remote={WITH_PASSWORD}", "use memory://host/x, and give the rest by FSSPEC_MEMORY_PASSWORD, or"),
        (f"checkpoint.remote=s3://u:{SECRET}@b/run", "by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws"),
        (
            f"train.callbacks=[{{name: mlflow, tracking_uri: 'postgresql://u:{SECRET}@h/db'}}]",
            "use postgresql://h/db, and give the rest by the variable that its service reads, such as MLFLOW_TRACKING_",
        ),
    ],
)
def test_the_sentence_says_where_to_put_it(setting: str, sentence: str, tmp_path: Path, tokens: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config(write_config(tmp_path, tokens), [setting])
    assert sentence in str(error.value)
    assert SECRET not in str(error.value)


def test_a_traceback_is_written_without_it() -> None:
    error = ConnectionError(f"Failed to connect to proxy URL: {WITH_PASSWORD}")
    failure = from_exception(1, error)
    assert SECRET not in formatted(error) + failure.error + failure.traceback + describe_error(error)
    assert "memory://***@host/x" in formatted(error)


COMMANDS = (
    "train c.yaml --run-dir new --set checkpoint.remote={}",
    "train c.yaml --run-dir {}",
    "train {} --run-dir new",
    "train c.yaml --run-dir new --set data.path={}",
    "config show c.yaml --set checkpoint.remote={}",
    "config show secret.yaml",
    "config diff c.yaml secret.yaml",
    "verify c.yaml --set checkpoint.remote={}",
    "plan secret.yaml --gpus 2",
    "data prepare {} --out new",
    "data show {}",
    "checkpoint import {} --out new",
    "checkpoint export {} --out new",
    "checkpoint show {}",
    "generate {} --prompt a",
    "eval {} --data {}",
    "report {}",
    "parity compare {} {}",
    "{}",
    "train --{}",
)


def written(folder: Path) -> list[Path]:
    """The files in a folder that hold the secret, but those that the test has put there."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.resolve().name != "secret.yaml"]
    return [path for path in files if SECRET.encode() in path.read_bytes() or SECRET in path.name]


@pytest.mark.slow
@pytest.mark.parametrize("address", ADDRESSES[:4:3])
def test_no_command_repeats_a_secret(address: str, tmp_path: Path, tokens: Path) -> None:
    """Where an address stands in a command line or a config, every command is refused without repeating it."""
    write_config(tmp_path, tokens).rename(tmp_path / "c.yaml")
    with (tmp_path / "secret.yaml").open("w") as file:
        file.write((tmp_path / "c.yaml").read_text().replace("{every: 2}", f"{{remote: '{address}'}}"))
    for command in COMMANDS:
        arguments = [word.replace("{}", address) for word in command.split()]
        ended = ready.run(
            [sys.executable, "-m", "threefold", *arguments], cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}
        )
        assert ended.returncode == 2, command
        assert SECRET not in ended.stdout + ended.stderr, command
        assert written(tmp_path) == [], command


CUSTOM = f"""
from threefold import Callback

class Mine(Callback):
    def after_step(self, record):
        if record.step == 3:
            secret = "{SECRET[:4]}" + "{SECRET[4:]}"
            raise ConnectionError("Failed to connect to proxy URL: https://user:" + secret + "@proxy/x?sig=" + secret)
"""


@pytest.mark.slow
def test_a_run_writes_no_secret_of_its_environment(tmp_path: Path, tokens: Path) -> None:
    """Nor one that an error of another package quotes, nor one that a run of an earlier version has stored."""
    write_config(tmp_path, tokens).rename(tmp_path / "c.yaml")
    (tmp_path / "faulty.py").write_text(CUSTOM)
    names = ["HTTP_PROXY", "HTTPS_PROXY", "MLFLOW_TRACKING_URI", "WANDB_BASE_URL"]
    environment = os.environ | {"HOME": str(tmp_path), "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ACCESS_KEY_ID": "a"}
    environment |= dict.fromkeys(names, f"http://user:{SECRET}@127.0.0.1:9/x")
    environment |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:9/x?sig={SECRET}",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }

    def run(command: str, status: int = 0) -> str:
        words = [sys.executable, "-m", "threefold", *command.split()]
        ended = ready.run(words, cwd=tmp_path, env=environment)
        assert ended.returncode == status, (command, ended.stdout, ended.stderr)
        assert SECRET not in ended.stdout + ended.stderr, (command, ended.stdout, ended.stderr)
        assert written(tmp_path) == [], command
        return ended.stdout + ended.stderr

    run(f"train c.yaml --run-dir run --set checkpoint.remote=file://{tmp_path}/there --set parallel.dp=2")
    run("report run --html report-of.html")
    run("checkpoint show run")
    run("checkpoint convert run --out weights --format safetensors")
    run("doctor --quick")
    own = "--set train.callbacks=[{}]"
    run(f"train c.yaml --run-dir other --set parallel.dp=2 {own.format('faulty.py:Mine')}", 2)
    assert "***" in run("train c.yaml --run-dir remote --set checkpoint.remote=s3://bucket/run", 2)
    stored = tmp_path / "run" / "config.yaml"
    stored.write_text(stored.read_text().replace(f"file://{tmp_path}/there", WITH_PASSWORD))
    stored.rename(tmp_path / "run" / "secret.yaml")
    stored.symlink_to("secret.yaml")
    assert "***" in run("report run --html report-of.html") + (tmp_path / "report-of.html").read_text()
    assert json.dumps(WITH_PASSWORD) not in (tmp_path / "report-of.html").read_text()
