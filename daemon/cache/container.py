"""Files that hold a description and named arrays: safetensors with a checksum over every byte of meaning.

A file appears under its name whole or not at all, readable by its owner only. Reading one checks
everything before any array is handed out, and runs no parser but Python's own on it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from daemon.cache.side import dtype_name
from daemon.errors import SnapshotError

FORMAT = "tqd-kv"
VERSION = 1

_MOST_HEADER_BYTES = (
    64 * 2**20
)  # far above any description; a damaged length must not fill the memory
_NO_CHECKSUM = "0" * 64
MAKE_ANEW = "delete the file; the cache is made again from the prompt"

# MLX's name of a dtype: safetensors' name, and a numpy dtype of the same bytes (numpy has no bfloat16)
_DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("BOOL", "?"), "uint8": ("U8", "u1"), "int8": ("I8", "i1"), "uint16": ("U16", "<u2"), "int16": ("I16", "<i2"),
    "uint32": ("U32", "<u4"), "int32": ("I32", "<i4"), "uint64": ("U64", "<u8"), "int64": ("I64", "<i8"),
    "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2"), "float32": ("F32", "<f4"),
}  # fmt: skip
_MLX_NAMES = {theirs: ours for ours, (theirs, _) in _DTYPES.items()}


def write(path: Path, description: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> None:
    """Write *description*, which JSON can hold, and *arrays* to *path*.

    Raises:
        SnapshotError: the file cannot be written; a file that was there before stays.
    """
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "description": _canonical(description),
            "checksum": _NO_CHECKSUM,
        }
    }
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _DTYPES[dtype_name(array)][0],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    try:
        with _replacing(path) as file:
            blank = _header_bytes(header)
            digest = hashlib.sha256(blank)
            file.write(blank)
            for array in arrays.values():
                data = _bytes(array)
                digest.update(data)
                file.write(data)
            header["__metadata__"]["checksum"] = digest.hexdigest()
            file.seek(0)
            file.write(_header_bytes(header))
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Return the description and the arrays of the file at *path*.

    Raises:
        SnapshotError: there is no such file, it is of another format or version, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror or error}") from error


def damaged(path: Path, what: str) -> SnapshotError:
    """Return the refusal of a file that is not as it was written."""
    return SnapshotError(f"{path} is damaged: {what}", hint=MAKE_ANEW)


class _Entry(BaseModel):
    """One array of a file; its bytes begin and end at *data_offsets* after the header."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


class _Metadata(BaseModel):
    """What is not an array; safetensors allows text only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: str
    version: str
    description: str
    checksum: str


_ENTRIES = TypeAdapter(dict[str, _Entry])


def _read(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise damaged(path, f"its {size:,} bytes are no safetensors file")
    raw = file.read(length)
    header, metadata = _parsed(raw, path)
    if _header_bytes(header) != prefix + raw:
        raise damaged(path, "its header is not as it was written")
    entries = _entries(header, size - 8 - length, path)
    header["__metadata__"] = {**metadata.model_dump(), "checksum": _NO_CHECKSUM}
    digest = hashlib.sha256(_header_bytes(header))
    arrays = {}
    for name, entry in entries:
        data = file.read(entry.data_offsets[1] - entry.data_offsets[0])
        digest.update(data)
        arrays[name] = _array(data, entry)
    if digest.hexdigest() != metadata.checksum:
        raise damaged(path, "its checksum is not that of its content")
    return json.loads(metadata.description), arrays


def _parsed(raw: bytes, path: Path) -> tuple[dict[str, Any], _Metadata]:
    """Return header and metadata of a file of our format and version."""
    try:
        header = json.loads(raw)
        said = header["__metadata__"]
        found, version = said["format"], said["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(path, f"it has no {FORMAT} header") from error
    if found != FORMAT:
        raise SnapshotError(f'{path} is of format "{found}"; a snapshot is of format "{FORMAT}"')
    if version != str(VERSION):
        raise SnapshotError(
            f"{path} is of version {version}; this build reads version {VERSION}", hint=MAKE_ANEW
        )
    try:
        return header, _Metadata.model_validate(said)
    except ValidationError as error:
        raise damaged(path, "its header is not as it was written") from error


def _entries(header: Mapping[str, Any], data_bytes: int, path: Path) -> list[tuple[str, _Entry]]:
    """Return the arrays of *header* in the order of their bytes, which follow each other without a gap."""
    listed = {name: found for name, found in header.items() if name != "__metadata__"}
    try:
        entries = sorted(
            _ENTRIES.validate_python(listed).items(), key=lambda item: item[1].data_offsets
        )
    except ValidationError as error:
        raise damaged(path, "its list of arrays is not as it was written") from error
    at = 0
    for name, entry in entries:
        first, last = entry.data_offsets
        kind = _MLX_NAMES.get(entry.dtype)
        if kind is None or first != at or last - first != _nbytes(kind, entry.shape):
            raise damaged(path, f'its array "{name}" is not where it should be')
        at = last
    if at != data_bytes:
        raise damaged(path, f"it has {data_bytes:,} bytes of arrays where {at:,} belong")
    return entries


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(_DTYPES[kind][1]).itemsize


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = _canonical(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: mx.array) -> bytes:
    plain = array.view(mx.uint16) if dtype_name(array) == "bfloat16" else array
    return np.array(plain).tobytes()


def _array(data: bytes, entry: _Entry) -> mx.array:
    kind = _DTYPES[_MLX_NAMES[entry.dtype]][1]
    plain = mx.array(np.frombuffer(data, dtype=kind).reshape(entry.shape))
    return plain.view(mx.bfloat16) if entry.dtype == "BF16" else plain


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside *path* that takes its place, on disk for good, once the block ends well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
