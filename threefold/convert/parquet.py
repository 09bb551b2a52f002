"""Texts in a column of a parquet file, for `threefold data prepare`."""

from collections.abc import Iterator
from typing import Final

from threefold.data.sources import CHUNK, SourceReader, checked
from threefold.errors import UserError

_ROWS: Final = 16
"""Rows of parquet that are read at once: a file of a kilobyte can name one long text in each of a thousand rows."""


def parquet_texts(source: SourceReader) -> Iterator[str]:
    """Yield the texts of a column. Raises UserError if the file or the column cannot be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f'{source.path} needs pyarrow to be read; install it with pip install "threefold[parquet]"'
        ) from None
    try:
        with source.opened() as raw, pyarrow.parquet.ParquetFile(source.path) as file:
            size, rows, schema = source.path.stat().st_size, 0, file.schema_arrow
            if source.key not in schema.names:
                names = ", ".join(f'"{name}"' for name in schema.names)
                raise UserError(
                    f'{source.path} has no column "{source.key}" (its columns: {names}); name the right one with --key'
                )
            kind = schema.field(source.key).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise UserError(
                    f'{source.path} has no text in column "{source.key}" but {kind}; name a column of strings with '
                    "--key"
                )
            for batch in file.iter_batches(batch_size=_ROWS, columns=[source.key]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield checked(text, f"A document of {source.path}")
                # Parquet is read out of order, so a second reader follows for the hash and the progress.
                rows += batch.num_rows
                while source.bytes < rows / file.metadata.num_rows * size and raw.read(CHUNK):
                    pass
            while raw.read(CHUNK):
                pass
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source.path} cannot be read as parquet ({reason}); it may be truncated") from None
