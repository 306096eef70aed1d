"""Content-addressed files and adapters that gateways and workers share. Torch-free; every call may block."""

from polygraft.blobs.errors import BlobError, BlobUnavailable
from polygraft.blobs.folder import BlobStore
from polygraft.blobs.place import BlobPlace, blob_place

__all__ = ["BlobError", "BlobPlace", "BlobStore", "BlobUnavailable", "blob_place"]
