"""Names that are symbolic links: nothing is written through one into a file elsewhere."""

import os
import stat
from pathlib import Path


def replace_link(path: Path) -> Path:
    """Remove a symbolic link from the name of a file that is about to be written; what it leads to stays as it is.

    A link to a device or a pipe stays, as where a file is sent to /dev/null.

    Returns:
        the path.

    Raises:
        OSError: the link cannot be removed.
    """
    if path.is_symlink():
        try:
            found = os.stat(path).st_mode
        except OSError:  # it leads nowhere
            found = stat.S_IFREG
        if stat.S_ISREG(found):
            path.unlink(missing_ok=True)
    return path
