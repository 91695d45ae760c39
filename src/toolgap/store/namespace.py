"""What must be equal for a page to be reusable: the namespace of a store."""

import hashlib

import msgspec


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that all pages of one store share. What differs by rank or pool belongs to a page's key."""

    model: str
    """Its name or path, as served."""
    weights: str
    """A fingerprint of the weights: equal names with other weights must differ here."""
    dtype: str
    """Of the KV."""
    layout: str
    """Of a page's bytes: the host pool's layout, head counts and sizes, in any fixed notation."""
    page_size_tokens: int
    ranks: str = "1"
    """The parallel shape, such as ``tp2 pp1``: sizes, not a rank's own number."""
    salt: str = ""
    """Whatever else must be equal, chosen by the operator."""

    def encoded(self) -> bytes:
        """One line of JSON with sorted fields: equal for equal namespaces."""
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> bytes:
        """32 bytes, in every page's header."""
        return hashlib.sha256(self.encoded()).digest()

    def differences(self, other: "Namespace") -> list[str]:
        """The names of the fields in which the two differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
