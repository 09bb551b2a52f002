"""What Weights & Biases and MLflow have of a run, in the modes in which they need no server."""

import json
import struct
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from tests.train.support import Run, record, steps_of, train_rank
from threefold.errors import UserError
from threefold.report.callbacks import MLflowRun, WeightsAndBiases
from threefold.report.metrics import read_metrics
from threefold.report.tensorboard import Tracker
from threefold.train.callbacks.base import RunContext
from threefold.train.callbacks.records import EvaluationRecord
from threefold.train.callbacks.registry import check_names, try_trackers
from threefold.verify.worker_pool import WorkerPool


def of(run: Run, entry: dict[str, Any]) -> Run:
    settings = (("train.eval_every", 2), ("train.eval_batches", 1), ("train.callbacks", [entry]))
    return run.but(dp=2, steps=3, set=settings)


@pytest.mark.slow
def test_weights_and_biases_offline(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """The records of its own file, read back by its own reader."""
    pytest.importorskip("wandb")
    run = of(small_run, {"name": "wandb", "project": "toy", "mode": "offline"})
    pool.run(2, train_rank, run, tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history, config, project = _wandb_records(file)
    assert project == "toy"
    assert json.loads(config["parallel"])["dp"] == 2
    steps = {int(row["_step"]): row for row in history if "loss" in row}
    for number, step in steps_of(tmp_path).items():
        assert float(steps[number]["loss"]) == step["loss"]
        assert float(steps[number]["lr"]) == step["lr"]
    valid = [line["valid_loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "valid_loss" in line]
    assert [float(row["valid_loss"]) for row in history if "valid_loss" in row] == valid


def _wandb_records(file: Path) -> tuple[list[dict[str, str]], dict[str, str], str]:
    """The history, config and project of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, str]] = []
    config: dict[str, str] = {}
    project = ""
    for data in _leveldb_log(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            history.append({"_step": str(record.history.step.num), **row})
        elif record.WhichOneof("record_type") == "run":
            project = record.run.project
            config |= {item.key: item.value_json for item in record.run.config.update}
    return history, config, project


def _leveldb_log(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of 32 KiB of fragments, each with checksum, length and type (whole,
    first, middle, last); before them 7 bytes of W&B's own."""
    place, part = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield part
            part = b""


@pytest.mark.slow
def test_mlflow_in_a_folder(tmp_path: Path, small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own store of files, read back by its own client."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "mlruns").as_uri()
    mesh: Any = None  # which it has no use for
    callback = MLflowRun("toy", tracking_uri=uri)
    callback.setup(RunContext(small_run.config, tmp_path / "named", mesh))
    callback.before_fit(0)
    callback.after_step(record(1, loss=2.5))
    callback.after_step(record(2, loss=1.5))
    callback.after_evaluation(EvaluationRecord(2, 3.5, 10, 1.0, {"a b?": 4.5}))
    callback.after_stop(2, "enough")
    callback.after_fit()
    callback.close()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name, found.data.tags["stopped"]) == ("FINISHED", "named", "enough")
    assert found.data.params["parallel.dp"] == "1"
    losses = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 2.5), (2, 1.5)]
    assert (found.data.metrics["valid_loss"], found.data.metrics["valid_loss.a_b_"]) == (3.5, 4.5)
    again = MLflowRun(tracking_uri=uri, run_id=found.info.run_id)
    again.setup(RunContext(small_run.config, tmp_path / "named", mesh))
    again.close()
    assert client.get_run(found.info.run_id).info.status == "FAILED"


UNREACHABLE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (
            {"name": "mlflow", "tracking_uri": "nonsense://x"},
            r"has mlflow, which cannot log \(.*; give it the tracking_uri",
        ),
        ({"name": "mlflow", "tracking_uri": "/nowhere/mlruns"}, r"has mlflow, which cannot log \(.*maintenance mode"),
        ({"name": "wandb", "entiy": "me"}, r"has wandb, which is given entiy; the nearest is entity\."),
        ({"name": "wandb", "mode": "ofline"}, r"has wandb with mode ofline, but it must be one of online, offline"),
    ],
)
def test_trackers_are_tried_before_ranks_start(
    entry: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(entry["name"])
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UserError, match=sentence) as told:
        try_trackers([entry])
    assert "\n" not in str(told.value)
    try_trackers([{"name": "mlflow", "tracking_uri": UNREACHABLE}, "csv_log", {"name": "wandb", "mode": "offline"}])


class Server(BaseHTTPRequestHandler):
    """What MLflow asks a tracking server for, at the beginning of a run and for each step."""

    answers: ClassVar[dict[str, Any]] = {
        "get-by-name": {"experiment": {"experiment_id": "7", "name": "threefold"}},
        "create": {"run": {"info": {"run_id": "abc", "run_uuid": "abc", "experiment_id": "7", "status": "RUNNING"}}},
    }
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        what = urlsplit(self.path).path.rpartition("/")[2]
        self.asked.append(what)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = json.dumps(self.answers.get(what, {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        pass


def test_a_server_that_vanishes_ends_no_run(
    tmp_path: Path, small_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a run; MLflow by itself would try again for minutes, in which no step is made."""
    variables = pytest.importorskip("mlflow.environment_variables")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "0")  # to be restored
        monkeypatch.delenv(name)
    Server.asked.clear()
    mesh: Any = None
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        callback = MLflowRun(tracking_uri=f"http://127.0.0.1:{server.server_port}")
        callback.setup(RunContext(small_run.config, tmp_path / "named", mesh))
        callback.after_step(record(1, loss=2.5))
        assert Server.asked == ["get-by-name", "create", "log-batch", "log-batch"]
        patience = (variables.MLFLOW_HTTP_REQUEST_TIMEOUT, variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES)
        assert [each.get() for each in patience] == [10, 1]
        assert not capsys.readouterr().out
        server.shutdown()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for number in (2, 3):
        callback.after_step(record(number, loss=2.5))
    callback.after_fit()
    callback.close()
    told = capsys.readouterr().out
    assert told.count("Warning: MLflow cannot log") == told.count("training continues without it") == 1
    assert len(Server.asked) == 4
    callback.setup(RunContext(small_run.config, tmp_path / "named", mesh))
    assert patience[1].get() == 0, "what the user has set is kept"


def fail(*args: Any, **options: Any) -> Any:
    raise ConnectionError("it went away")


class Failing:
    """Connection of a tracker of which every call fails, as when the service goes away."""

    __getattr__ = fail


@pytest.mark.parametrize("kind", [MLflowRun, WeightsAndBiases])
@pytest.mark.parametrize("event", ["setup", "after_step", "after_evaluation", "after_stop", "after_fit", "close"])
def test_an_error_of_a_tracker_ends_no_run(
    kind: type[Tracker],
    event: str,
    tmp_path: Path,
    small_run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At any event; it is reported once, and nothing is sent afterwards."""
    callback = kind()
    mesh: Any = None
    calls: dict[str, tuple[Any, ...]] = {
        "setup": (RunContext(small_run.config, tmp_path / "named", mesh),),
        "after_step": (record(1, loss=2.5),),
        "after_evaluation": (EvaluationRecord(2, 3.5, 10, 1.0, {}),),
        "after_stop": (2, "enough"),
        "after_fit": (),
        "close": (),
    }
    callback.connection = Failing()
    if event == "setup":
        module = pytest.importorskip("wandb" if kind is WeightsAndBiases else "mlflow.tracking")
        monkeypatch.setattr(module, "init" if kind is WeightsAndBiases else "MlflowClient", fail)
    for name, arguments in list(calls.items())[list(calls).index(event) :]:
        getattr(callback, name)(*arguments)
    printed = capsys.readouterr().out
    assert printed.count("it went away") == 1, printed
    assert "training continues without it" in printed


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"name": "csv_log", "paht": "x"}, r"has csv_log, which takes path but is given paht; the nearest is path\."),
        ({"name": "metrics", "path": "x"}, r"has metrics, which takes no arguments but is given path; leave it out\."),
        ({"name": "early_stopping", "mode": "up"}, r"^EarlyStopping has mode 'up' but it must be one of min, max"),
        ("no_such_file.py:Mine", r"but no_such_file\.py is not a file; name a Python file, as in my_file\.py:Mine\."),
        ("collections:OrderedDict", r"OrderedDict'> but must be a subclass of .*base\.Callback"),
    ],
)
def test_wrong_entries(entry: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_names([entry])


def test_a_callback_of_a_file_with_arguments(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """From the config, without a package; what it lacks is said before any process starts."""
    file = tmp_path / "my_callbacks.py"
    file.write_text(
        "import threefold as t3\n\n\nclass Steps(t3.Callback):\n"
        "    def __init__(self, file, every=1):\n        self.file, self.every = file, every\n"
        "    def setup(self, run):\n        self.path = run.run_dir / self.file\n"
        "    def after_step(self, record):\n"
        "        if record.step % self.every == 0:\n"
        "            self.path.open('a').write(f'{record.step} {record.loss!r}\\n')\n\n\n"
        "class NeedsMore(t3.Callback):\n    packages = ('no_such_package',)\n"
    )
    run = small_run.but(steps=4, set=(("train.callbacks", [{"name": f"{file}:Steps", "file": "x", "every": 2}]),))
    pool.run(1, train_rank, run, tmp_path / "run")
    expected = [f"{number} {step['loss']!r}" for number, step in steps_of(tmp_path / "run").items() if number % 2 == 0]
    assert (tmp_path / "run/x").read_text().splitlines() == expected
    with pytest.raises(UserError, match=r"takes file, every but is given fiel; the nearest is file\."):
        check_names([{"name": f"{file}:Steps", "fiel": "x"}])
    with pytest.raises(UserError, match=rf"which needs file; write {{name: {file}:Steps, file: …}}"):
        check_names([f"{file}:Steps"])
    with pytest.raises(UserError, match=r"NeedsMore, which needs the package no_such_package, .*`pip install no_such"):
        check_names([f"{file}:NeedsMore"])
