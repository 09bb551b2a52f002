"""Package outside Threefold that declares entry points, as `pip install` leaves it on Python's path."""

from pathlib import Path


def write_package(
    folder: Path, group: str, entries: dict[str, str], module: str = "", name: str = "toy_package"
) -> Path:
    """Write an importable module with metadata that declares its entry points, and return `folder`.

    Args:
        folder: folder for `PYTHONPATH` or `sys.path`; created if missing.
        group: group of the entry points, such as `threefold.optimizers`.
        entries: name → `module:attribute`.
        module: source of the module `name`.
        name: name of the package.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.py").write_text(module)
    return folder
