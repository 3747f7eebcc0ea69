"""Files and folders: where they may be, and how they are written."""

import os
import re
from pathlib import Path


def local_path(path: str | os.PathLike[str], name: str) -> Path:
    """The path, with `~` as the home folder.

    Raises:
        ValueError: a path `scheme://…` of another machine, under the `name` of the field.
    """
    # A Path has made one slash of the two.
    if remote := re.match(r"([A-Za-z][\w+.-]*):/+(.*)", os.fspath(path), re.DOTALL):
        raise ValueError(
            f"{name}='{remote[1]}://{remote[2]}': only local files and folders can be read and "
            "written; copy it here, or mount it, and give the path there"
        )
    return Path(os.path.expanduser(path))
