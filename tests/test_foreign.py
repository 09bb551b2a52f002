"""Files of folders that anyone may have made: what is read and written of them, and that nothing else opens them."""

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import threefold
from threefold.errors import UserError
from threefold.foreign import (
    MANIFEST,
    FolderFiles,
    lines_of,
    nofollow_file,
    nofollow_folder,
    open_nofollow,
    write_nofollow,
)

PACKAGE: Final = Path(threefold.__file__).parent


def put(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problem(use: Callable[..., object], given: object) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        use(given)
    return str(caught.value.strerror)


def test_only_a_regular_file_is_read_and_none_is_waited_for(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, said in (("fifo", "no regular file"), ("folder", "a folder"), ("none", "No such file")):
        for read in (files.opened, files.path, files.record):
            assert said in problem(read, name)
        with pytest.raises(UserError, match=said):
            files.text(name, "the config ")
    for name in ("../out", "a/b", "..", "", "/etc/passwd", "a\0b"):
        assert "its name is not that of a file" in problem(files.opened, name)


def test_a_link_is_followed_inside_its_folder(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", put(tmp_path / "secret")
    put(folder / "here", "mine")
    (folder / "inside").symlink_to("here")
    (tmp_path / "linked").symlink_to(folder)
    for name, target in (("out", secret), ("up", "../secret"), ("twice", "out"), ("zero", "/dev/zero")):
        (folder / name).symlink_to(target)
    for files in (FolderFiles(folder), FolderFiles(tmp_path / "linked")):
        assert files.text("inside") == "mine"
        for name in ("out", "up", "twice", "zero"):
            assert problem(files.opened, name) == "it is a link that leads out of its folder"


def test_links_of_a_cache_of_hugging_face_lead_to_its_blobs(tmp_path: Path) -> None:
    """Also from folders below the revision, as of a run, and not through a link among the blobs."""
    cache, secret = tmp_path / "models--a--b", put(tmp_path / "secret")
    revision = cache / "snapshots" / "0123"
    put(cache / "blobs" / "hash", "weights")
    put(cache / "refs" / "main", "0123")
    (cache / "blobs" / "evil").symlink_to(secret)
    below = revision / "checkpoints" / "step_00000001"
    below.mkdir(parents=True)
    for folder in (revision, below):
        for name, target in (
            ("good", "blobs/hash"),
            ("evil", "blobs/evil"),
            ("ref", "refs/main"),
            ("out", "../secret"),
        ):
            (folder / name).symlink_to(os.path.relpath(cache / target, folder))
        files = FolderFiles(folder)
        assert files.text("good") == "weights"
        for name in ("evil", "ref", "out"):
            assert problem(files.opened, name) == "it is a link that leads out of its folder"


def test_a_file_that_the_manifest_does_not_name_is_not_there(tmp_path: Path) -> None:
    put(
        tmp_path / MANIFEST,
        '{"format": "threefold-checkpoint", "files": {"named": {"bytes": 4}, "longer": {"bytes": 3}}}',
    )
    for name in ("named", "longer", "beside"):
        put(tmp_path / name)
    files = FolderFiles(tmp_path)
    assert [name for name in ("named", "beside", "missing", MANIFEST) if files.holds(name)] == ["named", MANIFEST]
    assert files.text("named") == "text"
    assert files.json(MANIFEST)["format"] == "threefold-checkpoint"
    assert problem(files.opened, "beside") == f"the {MANIFEST} beside it does not name it"
    assert problem(files.opened, "longer") == "it has 4 bytes and was written with 3"
    put(tmp_path / MANIFEST, "{}")  # of something else
    assert FolderFiles(tmp_path).text("beside") == "text"


def test_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path) -> None:
    put(tmp_path / "lines", "a\nb\n" + "c" * 100)
    with FolderFiles(tmp_path).record("lines") as file:
        assert list(lines_of(file)) == [b"a\n", b"b\n", b"c" * 100]
    os.truncate(tmp_path / "lines", 1 << 40)
    assert "it holds 1,099,511,627,776 bytes" in problem(FolderFiles(tmp_path).record, "lines")
    with pytest.raises(UserError, match="holds 1,099,511,627,776 bytes and 268,435,456 are allowed"):
        FolderFiles(tmp_path).text("lines")


def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path: Path) -> None:
    target = put(tmp_path / "target")
    for name in ("file", "nowhere"):
        (tmp_path / name).symlink_to(target if name == "file" else tmp_path / "missing")
        write_nofollow(tmp_path / name, "ours")
        assert (tmp_path / name).read_text() == "ours"
    (tmp_path / "appended").symlink_to(target)
    with open(open_nofollow(tmp_path / "appended", os.O_APPEND), "a") as file:
        file.write("more")
    (tmp_path / "folder").symlink_to(tmp_path)
    put(nofollow_folder(tmp_path / "folder") / "inside")
    assert (target.read_text(), (tmp_path / "appended").read_text()) == ("text", "more")
    assert not (tmp_path / "inside").exists()
    assert not (tmp_path / "missing").exists()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, said in (("fifo", "it is no regular file (a pipe, socket or device)"), ("folder", "Is a directory")):
        assert problem(nofollow_file, tmp_path / name) == said
    assert not nofollow_file(tmp_path / "zero").is_symlink()
    (tmp_path / "null").symlink_to("/dev/null")  # as of a user who wants no such file
    write_nofollow(nofollow_file(tmp_path / "null"), "ours")
    assert (tmp_path / "null").is_symlink()
    assert not FolderFiles(tmp_path).holds("null")


OPENING: Final = {
    *("open", "read_text", "read_bytes", "read_json", "write_text", "write_bytes", "touch", "open_regular"),
    *("exists", "lexists", "is_file", "isfile", "samefile", "stat", "getsize", "glob", "rglob", "require_file"),
    *(
        "checksum",
        "checksums",
        "copyfile",
        "copy2",
        "copytree",
        "move",
        "memmap",
        "fromfile",
        "from_file",
        "load_tokenizer",
    ),
    *(
        "safe_open",
        "save_file",
        "load_file",
        "savefig",
        "export_chrome_trace",
        "FileLock",
        "load_config",
        "read_document",
    ),
    *("put_file", "np.load", "np.save", "torch.load", "torch.save", "shutil.copy"),
}
"""Functions and methods that open a file by its path, or ask about one."""
DOOR: Final = {"FolderFiles", "path", "nofollow_file", "open_nofollow"}
"""Names in `threefold.foreign`: an opener of `nofollow_file(...)`, say, opens what that has allowed."""

ROOMS: Final = {
    "files.py foreign.py checksums.py": "they are the one place, and what it is made of",
    "output.py": "outputs in folders that it has made, and marks on what it may replace, looked at with lstat",
    "data convert compat parity planner config": "paths of data, configs and outputs that the user gives",
    "plugins.py": "code, which runs where the user names or trusts it",
    "comm cpu host.py torch_private": "memory of this process group, /proc, /sys, and the installed packages",
}
"""Rooms that open no file of a run, a checkpoint or a model folder by themselves, and what they open."""
CLOSER: Final = ("convert/checkpoints.py", "data/tokenizer.py")
"""Chapters of such a room that read files of checkpoints too."""
FUNCTIONS: Final = {
    "a config, prompts, data or an output that the user names": """
        api/trainer.py::read_config checkpoint/resume.py::find_warm_start
        cli/config.py::show cli/config.py::diff report/commands/data.py::show
        report/commands/data.py::_show_conversations report/tokens.py::_audit_folder
        report/tokens.py::_audit_foreign report/tokens.py::compare
        terminal.py::read_config report/page.py::require_page
        inference/commands/eval.py::command
        inference/commands/eval.py::_write verify/inspect_command.py::command
        inference/inputs.py::read_prompts inference/inputs.py::require_texts
        report/document.py::write_page report/figures.py::save
        train/saving.py::CheckpointContents.texts
        huggingface/conversations.py::read_template data/tokenizer.py::load_tokenizer
    """,
    "code that the user names or trusts": """
        checkpoint/folder.py::code_text checkpoint/code.py::checksum_of_code verify/run_verification.py::_key
        verify/command.py::_is_made_from_section
    """,
    "sources, pages, scripts and styles of the package": """
        report/document.py::make_page resilience/agreement.py::_read resilience/agreement.py::sources_checksum
    """,
    "a new file, in a folder that this save or conversion has made": """
        huggingface/shards.py::Shards.__init__ convert/checkpoints.py::TensorSource.mapped
        convert/checkpoints.py::write_run convert/checkpoints.py::_write_torch
        checkpoint/manifest.py::write_manifest checkpoint/tensors.py::Writer._write_file
        verify/reference.py::Trace.load verify/reference.py::Trace.save
    """,
    "O_EXCL, which follows no link": """
        launch/failure.py::claims_report report/tensorboard.py::TensorBoard._open
    """,
    "whether there is such an entry, which opens nothing": """
        checkpoint/folder.py::remove_partial checkpoint/save.py::put_in_place
        checkpoint/save.py::set_aside_checkpoint.rename report/checkpoints.py::listed report/checkpoints.py::locate
        report/checkpoints.py::saved_at huggingface/files.py::_files huggingface/source.py::check_import
        launch/run_folder.py::require_folder launch/run_folder.py::require_no_checkpoints
        launch/run_folder.py::require_no_foreign launch/run_folder.py::require_place
        launch/run_folder.py::require_writable
        report/live.py::RunServer._document report/record.py::require_run report/console.py::Summary.rows
        train/stop.py::_identity
    """,
    "a lock that `run_lock` has looked at": "launch/run_folder.py::require_free",
    "a method of ours of that name": """
        command_line.py::_describe resilience/remote.py::RemoteCheckpoints._make
        resilience/remote.py::RemoteCheckpoints._remove resilience/remote.py::RemoteCheckpoints.incomplete
        resilience/remote.py::RemoteCheckpoints.require_writable
        huggingface/files.py::texts_of
        huggingface/files.py::end_tokens huggingface/files.py::imported_config huggingface/import_hf.py::import_model
        huggingface/source.py::check_import train/callbacks/step_log.py::StepLog.before_fit
        huggingface/peft_import.py::PeftAdapter.__init__ report/metrics.py::RunFile.before_fit
        report/callbacks.py::Table._begin
    """,
    "standard streams, /dev/null, /dev/shm and /proc": """
        terminal.py::guard_streams launch/device.py::gpu_count launch/environment.py::_environment_of
        launch/environment.py::chosen_threads launch/output.py::_append launch/output.py::logged_and_shown
        launch/process.py::StopSignals.noted.end_on_second resilience/processes.py::_fields
        resilience/limits.py::_tasks_of_user resilience/processes.py::identify_process
        resilience/processes.py::process_state resilience/processes.py::worked_seconds
        resilience/limits.py::_task_limits resilience/states_in_memory.py::StateInMemory.__init__
        huggingface/limited.py::_reachable
    """,
    "the user's cache": "huggingface/tokenizer_check.py::try_tokenizer",
    "the model that a conversation is with": "inference/commands/chat.py::_as_run",
    "a picture in a new file of `nofollow_file`": "report/loss_curve.py::draw",
}
"""Other functions that call such a function or method, by what they open."""


def openings(tree: ast.AST, where: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions of a module that open a file or ask about one, unless `threefold.foreign` has allowed it."""
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", "") if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            of_door = (part for given in node.args for part in ast.walk(given) if isinstance(part, ast.Call))
            allowed = any(ast.unparse(part.func).rpartition(".")[2] in DOOR for part in of_door)
            if not OPENING.isdisjoint((called, called.rpartition(".")[2])) and not allowed:
                yield ".".join(where)
        yield from openings(node, (*where, name) if name else where)


def test_no_other_place_opens_files_of_such_folders() -> None:
    rooms = {room for each in ROOMS for room in each.split()}
    known = {function for each in FUNCTIONS.values() for function in each.split()}
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in CLOSER or name.partition("/")[0] not in rooms:
            found |= {f"{name}::{function}" for function in openings(ast.parse(path.read_text()))}
    assert sorted(found - known) == [], "let threefold.foreign open it, or name it here with the reason"
    assert sorted(known - found) == [], "it opens nothing any more: leave it out"
    assert [room for room in rooms if not (PACKAGE / room).exists()] == []


def test_an_opening_is_found_in_source() -> None:
    source = """
class Reader:
    def read(self):
        (folder / "huggingface-chat_template.jinja").read_text()
        open(path)
        safe_open(FolderFiles(folder).path(name))
def copy():
    shutil.copyfile(a, b)
    with open(open_nofollow(path), "w"):
        pass
def held():
    return FolderFiles(folder).holds(name) and files.text(name)
"""
    assert list(openings(ast.parse(source))) == ["Reader.read", "Reader.read", "copy"]
