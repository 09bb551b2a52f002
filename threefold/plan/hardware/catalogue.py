"""Where hardware entries are found: the package's catalogue, the user's folder, or a file."""

from functools import lru_cache
from pathlib import Path
from typing import Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.plan.hardware.entry import Hardware
from threefold.plan.hardware.reading import Entries, as_yaml, build, one_entry, read_entries

THIS_MACHINE: Final = "this-machine"
"""The entry that `threefold doctor` measures and saves."""
_CATALOGUE: Final = Path(__file__).with_name("catalogue.yaml")
_SUFFIXES: Final = (".yaml", ".yml")


def user_folder() -> Path:
    """Where a user's own entries are, each NAME.yaml."""
    from platformdirs import user_config_path

    return user_config_path("threefold") / "hardware"


@lru_cache(1)
def _entries() -> Entries:
    """Those of the package, which do not change while it runs."""
    return read_entries(_CATALOGUE)


def hardware_names() -> list[str]:
    """Every name that `find_hardware` knows, those of the user's folder after those of the package."""
    own = sorted(path.stem for path in user_folder().glob("*.yaml")) if user_folder().is_dir() else []
    return [*_entries(), *(name for name in own if name not in _entries())]


def find_hardware(name_or_path: str) -> Hardware:
    """The entry of a name, which the user's folder may replace, or the one entry of a YAML file.

    Args:
        name_or_path: a name of the catalogue or of the user's folder, in any case; or the path of a `.yaml` file whose
            entry may be `like` one of the catalogue.

    Raises:
        UserError: there is no such entry, or it has a mistake.
    """
    if name_or_path.lower().endswith(_SUFFIXES):
        return _of_file(Path(name_or_path), "")
    name = name_or_path.lower()
    own = user_folder() / f"{name}.yaml"
    if Path(name).name == name and own.is_file():
        return _of_file(own, name)
    if name in _entries():
        return build(name, _entries(), "catalogue")
    if name == THIS_MACHINE:
        raise UserError(f"The hardware {THIS_MACHINE} is not measured yet; run threefold doctor, which saves it.")
    choice = one_entry(name, hardware_names())
    called = shown(name_or_path) or repr(name_or_path)
    if Path(f"{name_or_path}.yaml").is_file():
        raise UserError(f"The hardware {called} is no entry, but there is a file {called}.yaml here; use that.")
    raise UserError(f"The hardware {called} is unknown; give the path of a YAML file or {choice}.")


def _of_file(path: Path, wanted: str) -> Hardware:
    entries = read_entries(path)
    name = wanted if wanted in entries else next(iter(entries))
    if len(entries) > 1 and name != wanted:
        raise UserError(f"{shown(path)} holds {len(entries)} hardware entries; leave one in a file.")
    return build(name, {**_entries(), **entries}, shown(path))


def save_hardware(hardware: Hardware) -> Path:
    """Write an entry to the user's folder, in place of one of its name.

    Raises:
        UserError: the folder cannot be written.
    """
    path = user_folder() / f"{hardware.name}.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_yaml(hardware), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write the hardware entry {shown(path)}: {error.strerror}.") from None
    return path
