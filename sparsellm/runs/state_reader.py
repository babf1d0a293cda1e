"""Reads a checkpoint's state/ through torch.distributed.checkpoint (DCP) without executing anything in it.

DCP stores tensors in files that torch reads with weights_only, and describes the tensors in `.metadata`, a pickle,
which could call any Python function. Here a pickle may refer only to the classes that describe tensors (NAMES), which
are plain data. BytesStorageMetadata is not in NAMES: DCP would unpickle the bytes that such an entry refers to.
"""

import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from sparsellm.system.errors import SparsellmError

_METADATA = "torch.distributed.checkpoint.metadata"
NAMES = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}  # fmt: skip


class StateRefused(SparsellmError, ValueError):
    """A `.metadata` file has content that sparsellm never writes."""


class StateReader(FileSystemReader):
    """DCP's folder reader, with an unpickler for `.metadata` that accepts only NAMES."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises StateRefused if `.metadata` has content that sparsellm never writes."""
        path = Path(self.path, ".metadata")
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
        if not isinstance(metadata, Metadata):
            _refuse(path, f"holds a {type(metadata).__name__} instead of Metadata")
        for info in metadata.storage_data.values():
            if info.relative_path != Path(info.relative_path).name or info.transform_descriptors:
                _refuse(path, f"refers to {info.relative_path!r}, which is not a file in its folder")
        return metadata

    def described(self) -> dict[str, TensorStorageMetadata]:
        """Dtype and size of each tensor, by name. Raises StateRefused, like `read_metadata`."""
        entries = self.read_metadata().state_dict_metadata.items()
        return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            _refuse(self.path, f"refers to {module}.{name}")
        return super().find_class(module, name)


def _refuse(path: Path, why: str) -> NoReturn:
    raise StateRefused(
        f"{path} {why}, which no checkpoint of sparsellm does. Nothing in it was executed. Find out who wrote it, and"
        " resume from another checkpoint"
    )
