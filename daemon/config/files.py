"""Read a file that a user named, without trusting that it is one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_FILE_BYTES = 8 * 2**20  # 1,000 servers with every key written out need 2 MiB


class UnreadableError(Exception):
    """A file cannot be read; says why in words for a user."""


def read_file(path: Path) -> bytes:
    """Return the content of the regular file *path*.

    Raises:
        UnreadableError: it is missing, forbidden, no regular file, or too large.
    """
    try:
        # a named pipe without a writer must not hang us
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UnreadableError("not a regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableError(_fault(error)) from error
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableError(f"larger than {MAX_FILE_BYTES // 2**20} MiB")
    return content


def decode(content: bytes) -> str:
    """Return *content* as text.

    Raises:
        UnreadableError: it is not UTF-8; says on which line.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"not UTF-8 text (line {line})") from error


def _fault(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case IsADirectoryError():
            return "a folder, not a file"
        case PermissionError():
            return "permission to read it is denied"
        case _:
            return f"cannot be read: {error.strerror or error}"
