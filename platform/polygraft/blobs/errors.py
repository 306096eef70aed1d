"""What can go wrong with a blob."""

from polygraft.errors import PolygraftError


class BlobError(PolygraftError):
    """A digest that is none, or one of which the store holds nothing, or nothing that is whole."""


class BlobUnavailable(BlobError):
    """The store does not answer; what it holds may well be whole."""
