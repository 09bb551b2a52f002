"""Reading text from parquet files, which needs the extra `parquet` of the package."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from threefold.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet

_ROWS: Final = 1024


def parquet_batches(path: Path, column: str) -> Iterator[tuple[list[str], float]]:
    """The texts of a column, some rows at a time; rows without one are left out.

    Yields:
        the texts, and the share of the file's rows that are read with them; the last is 1.

    Raises:
        UserError: pyarrow is not installed, the file is no parquet file or damaged, or has no such column of text.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f'{path} needs pyarrow to be read; install it with pip install "threefold[parquet]"') from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_column(path, file, column)
            read = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                read += batch.num_rows
                yield [text for text in batch.column(0).to_pylist() if text is not None], read / file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as parquet ({reason}); it may be truncated") from None


def _check_column(path: Path, file: "pyarrow.parquet.ParquetFile", column: str) -> None:
    import pyarrow

    schema = file.schema_arrow
    if column not in schema.names:
        names = ", ".join(f'"{name}"' for name in schema.names)
        raise UserError(f'{path} has no column "{column}" (its columns: {names}); name the right one with --key')
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f'{path} has no text in column "{column}" but {kind}; name a column of strings with --key')
