"""`threefold doctor`: what this machine is, what it reaches, and what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from threefold.plan.hardware.entry import Hardware


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH.yaml",
            help="Write the hardware entry to this file in place of the user's folder, where it is `this-machine`.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure roughly, for some seconds; save an entry with --save alone.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder whose disk is measured, such as the one of your runs.")
    ] = Path(),
) -> None:
    """Examine this machine: its parts, versions, backends, network and limits, and what local ranks reach on it.

    Measures products of matrices, memory, collectives of 2, 4 and 8 local ranks, and the disk, for about half a minute;
    saves the hardware entry `this-machine` for `threefold estimate` and the MFU of runs; and says what is wrong.
    """
    from threefold.cli.planning.doctor_view import print_examination
    from threefold.cli.planning.steps import Steps
    from threefold.plan.doctor.examination import examine
    from threefold.plan.doctor.measured_entry import measured_entry

    _check_save(save)
    _check_folder(folder)
    with Steps("Measuring", shown=not as_json) as steps:
        found = examine(_run_ranks, folder, quick, steps.tell)
    entry = measured_entry(found)
    saved = None if entry is None or (quick and save is None) else _save(entry, save)
    if as_json:
        values: dict[str, Any] = found.as_json()
        typer.echo(json.dumps({**values, "saved": None if saved is None else str(saved)}))
    else:
        print_examination(found, entry, saved)
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


def _run_ranks(worker: Callable[..., object], args: tuple[Any, ...], ranks: int, device: str) -> object:
    from threefold.launch import spawn

    return spawn(worker, args, ranks, device="cuda" if device == "cuda" else "cpu", timeout=60.0)


def _check_save(path: Path | None) -> None:
    from threefold.errors import UserError
    from threefold.files import shown

    if path is None:
        return
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise UserError(f"--save is {shown(path)} but must end in .yaml; use {shown(path.with_suffix('.yaml'))}.")
    if not path.parent.is_dir() or path.is_dir():
        raise UserError(f"--save is {shown(path)} but no file can be written there; name one in a folder that exists.")
    if path.is_file() and not _is_ours(path):
        raise UserError(
            f"--save is {shown(path)} but doctor has not written that file; name one that is not there yet."
        )


def _is_ours(path: Path) -> bool:
    """Whether a file begins as an entry that `_save` has written."""
    from threefold.plan.hardware.catalogue import THIS_MACHINE

    try:
        with path.open("rb") as file:
            return file.readline().strip() == f"{THIS_MACHINE}:".encode()
    except OSError:
        return False


def _check_folder(folder: Path) -> None:
    from threefold.errors import UserError
    from threefold.files import shown

    if not folder.is_dir():
        raise UserError(f"--folder is {shown(folder)} but there is no such folder; name one that exists, such as `.`.")


def _save(entry: "Hardware", path: Path | None) -> Path:
    from threefold.errors import UserError
    from threefold.files import shown
    from threefold.plan.hardware.catalogue import save_hardware
    from threefold.plan.hardware.reading import as_yaml

    if path is None:
        return save_hardware(entry)
    try:
        path.write_text(as_yaml(entry), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write the hardware entry {shown(path)}: {error.strerror}.") from None
    return path
