"""From a model string to a folder, offline, and what identifies the model in it.

Never the network: a hub id is looked up in the local Hugging Face cache, as huggingface_hub lays it out.
Weights are never read beyond the headers of their files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.config.files import UnreadableError, decode, read_file
from daemon.errors import TqdError

MAIN_REVISION = "main"
WEIGHT_FILES = "model*.safetensors"  # what mlx-lm loads

_FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library refuses
_LFS_POINTER = b"version https://git-lfs"


class ModelMissingError(TqdError):
    """No folder on this machine is the model; *hint* says how to get it."""


class ModelFaultError(TqdError):
    """The model's folder holds something that is not what it should be."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Located:
    """A model's folder, and the commit where it is a snapshot of the hub."""

    folder: Path
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The weight files of a folder: their names, sizes in bytes, and the raw JSON of their headers."""

    files: tuple[tuple[str, int, bytes], ...]

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(size for _, size, _ in self.files)

    @property
    def value_bytes(self) -> int:
        """The size of a number as the model computes: 4 where most of its floating-point values are F32, else 2."""
        counted = {2: 0, 4: 0}
        for _, _, header in self.files:
            for name, tensor in json.loads(header).items():
                size = _FLOAT_BYTES.get(tensor.get("dtype")) if name != "__metadata__" else None
                if size is not None:
                    first, end = tensor["data_offsets"]
                    counted[size] += end - first
        return 4 if counted[4] > counted[2] else 2


def locate(model: str, revision: str | None, *, hub: Path) -> Located:
    """Return where *model* is: a folder as it is, a hub id below the cache folder *hub*.

    Raises:
        ModelMissingError: it is nowhere on this machine.
    """
    if Path(model).is_absolute():
        return Located(_complete(Path(model)))
    repo = hub / f"models--{model.replace('/', '--')}"
    commit = _commit(repo, revision or MAIN_REVISION)
    if commit is None:
        at = f" at revision {revision}" if revision and repo.is_dir() else ""
        raise ModelMissingError(
            f"no such folder, and the local Hugging Face cache does not hold this hub id{at}",
            hint="`tqd pull` fetches it; or write the path of a folder",
        )
    return Located(_complete(repo / "snapshots" / commit), commit)


def _complete(folder: Path) -> Path:
    try:
        present, complete = folder.is_dir(), (folder / "config.json").exists()
    except OSError as error:
        raise ModelMissingError(f"the model's folder cannot be read: {error.strerror}") from error
    if not present:
        raise ModelMissingError(
            f"there is no folder {folder}",
            hint="a relative path starts from the file that holds it",
        )
    if not complete:
        raise ModelMissingError(
            "the folder holds no config.json",
            hint="it must be a model in MLX or Hugging Face format",
        )
    return folder


def _commit(repo: Path, revision: str) -> str | None:
    """Return the commit that *revision* (a branch, a tag or a commit) means in the cache of one model."""
    parts = revision.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts):
        return None
    try:
        if len(parts) == 1 and (repo / "snapshots" / revision).is_dir():
            return revision
        commit = decode(read_file(repo / "refs" / revision)).strip()
    except (OSError, UnreadableError):
        return None
    return commit if commit.isalnum() and (repo / "snapshots" / commit).is_dir() else None


def read_config(folder: Path) -> dict[str, object]:
    """Return the content of the model's config.json.

    Raises:
        ModelFaultError: it cannot be read or is no JSON object.
    """
    try:
        config = json.loads(decode(read_file(folder / "config.json")))
    except UnreadableError as error:
        raise ModelFaultError(f"the model's config.json: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelFaultError(
            f"the model's config.json is not JSON: line {error.lineno}, {error.msg}",
            hint="the download is damaged; fetch the file again",
        ) from error
    except (RecursionError, ValueError) as error:
        raise ModelFaultError("the model's config.json is not JSON that can be read") from error
    if not isinstance(config, dict):
        raise ModelFaultError("the model's config.json holds no JSON object")
    return config


def read_weights(folder: Path) -> Weights:
    """Return the headers and sizes of the model's weight files; no file at all is no weights.

    Raises:
        ModelMissingError: the index names a file that is not there.
        ModelFaultError: a file is cut short or is no safetensors file.
    """
    names = sorted(path.name for path in folder.glob(WEIGHT_FILES))
    absent = sorted(_indexed(folder) - set(names))
    if names and absent:
        raise ModelMissingError(
            f"the weights are not complete: {absent[0]} is missing"
            + (f" and {len(absent) - 1} more" if len(absent) > 1 else ""),
            hint="finish the download",
        )
    return Weights(tuple(_header(folder / name) for name in names))


def _indexed(folder: Path) -> set[str]:
    """Return the names of the files that the index of a model in several files lists."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return set()
    try:
        weight_map = json.loads(decode(read_file(path)))["weight_map"]
        return {str(name) for name in weight_map.values()}
    except (
        UnreadableError,
        ValueError,
        RecursionError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ModelFaultError(
            f"{path.name} is damaged: it holds no weight_map", hint="fetch the file again"
        ) from error


def _header(path: Path) -> tuple[str, int, bytes]:
    """Return name, size and header of one file; format: 8 bytes of length, JSON, tensors."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(_LFS_POINTER))
            length = int.from_bytes(start[:8], "little")
            if start == _LFS_POINTER:
                raise _damaged(path, "a Git LFS pointer, not weights", "run `git lfs pull`")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, "not a safetensors file, or cut short")
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror or error}") from error
    end = max(_ends(header, path), default=0)
    if end != size - 8 - length:
        raise _damaged(path, f"{size:,} bytes, where its header describes {end + 8 + length:,}")
    return path.name, size, header


def _ends(header: bytes, path: Path) -> Iterator[int]:
    """Yield where each tensor ends, counted from the end of the header."""
    try:
        tensors = json.loads(header)
        for name, tensor in tensors.items():
            if name != "__metadata__":
                yield int(tensor["data_offsets"][1])
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header is no safetensors header") from error


def _damaged(path: Path, what: str, hint: str = "fetch the file again") -> ModelFaultError:
    return ModelFaultError(f"the weights in {path.name} are damaged: {what}", hint=hint)


def fingerprint(located: Located, weights: Weights | None = None) -> str:
    """Return the identity of the model: a sha256 that says the same bytes without hashing the weights.

    It covers config.json, tokenizer.json, the headers and sizes of the weight files, and the hub commit.

    Raises:
        ModelMissingError: the weights are not complete.
        ModelFaultError: a weight file is damaged.
    """
    weights = weights if weights is not None else read_weights(located.folder)
    parts: Mapping[str, bytes] = {
        "config.json": _content_digest(located.folder / "config.json"),
        "tokenizer.json": _content_digest(located.folder / "tokenizer.json"),
        "commit": (located.commit or "").encode(),
        **{name: size.to_bytes(8, "little") + header for name, size, header in weights.files},
    }
    digest = hashlib.sha256()
    for name, content in parts.items():
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _content_digest(path: Path) -> bytes:
    """Return the digest of a file of any size, nothing where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
