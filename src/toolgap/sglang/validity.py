"""What this server's KV is valid for, and whether what it keeps may be of something else."""

from toolgap.protocol import Code, Refused
from toolgap.sglang.internals.engine import Engine


class Validity:
    """Follows changes of the weights and of storage in one scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._namespace: str | None = None
        self._weights_epoch = 0
        self._stale_storage = False
        self._storage_was_replaced = False
        self.stale_cache = False
        """Whether L1 and L2 may hold KV of older weights."""

    @property
    def namespace(self) -> str:
        """Fingerprint of what this server's KV is valid for."""
        if self._namespace is None:
            self._namespace = self._engine.namespace(self._weights_epoch)
        return self._namespace

    @property
    def weights_were_updated(self) -> bool:
        """Whether the weights are not those that the server was started with."""
        return self._weights_epoch > 0

    def check_namespace(self, expected: str | None) -> None:
        """Raise Refused (409) unless a caller's namespace, if it names one, is this server's."""
        if expected is not None and expected != self.namespace:
            raise Refused(
                Code.NAMESPACE_MISMATCH,
                f"this server's namespace is {self.namespace}: model, weights, KV layout or storage differ",
                field="namespace",
            )

    def check_storage(self) -> None:
        """Raise Refused (409 or 501) unless storage can be read from, and holds nothing of older weights."""
        if obstacle := self._engine.storage_obstacle():
            if self._storage_was_replaced and not self._engine.storage_backend:
                raise Refused(Code.STORAGE_REPLACED, "the storage backend was detached: attach one first")
            raise Refused(Code.NOT_SUPPORTED, obstacle)
        if self.stale_cache or self._stale_storage:
            raise Refused(
                Code.STORAGE_STALE,
                "weights were updated, and the cache or storage may hold KV of the old ones: POST /flush_cache, then "
                "POST /hicache/storage-backend/clear",
            )

    def namespace_changed(self) -> None:
        """Something that the namespace is made of changed."""
        self._namespace = None

    def weights_changed(self) -> None:
        """KV in the cache and in storage may be of other weights from now on."""
        self._weights_epoch += 1
        self.namespace_changed()
        self.stale_cache = self._stale_storage = True

    def cache_dropped(self) -> None:
        """L1 and L2 are empty."""
        self.stale_cache = False

    def storage_changed(self, *, cleared: bool) -> None:
        """The storage backend was attached, detached or cleared."""
        self.namespace_changed()
        self._storage_was_replaced = True
        if cleared and not self.stale_cache:
            self._stale_storage = False
