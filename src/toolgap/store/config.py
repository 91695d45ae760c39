"""The store's part of SGLang's ``--hicache-storage-backend-extra-config``, read and written."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from toolgap.store.errors import StoreError
from toolgap.store.options import Fsync, Options, ReadPath

BACKEND, BACKEND_NAME = "dynamic", "toolgap"
MODULE, CLASS = "toolgap.store.hicache", "ToolgapStore"
PATH = "TOOLGAP_STORE_PATH"
"""Names the folder where the configuration does not."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an operator says of a store."""

    path: str = ""
    limit_bytes: int | None = None
    fsync: Fsync = Fsync.NONE
    read_path: ReadPath = ReadPath.AUTO
    readers: int = Options().readers
    salt: str = ""
    """Whatever else must be equal for pages to be reusable."""
    weights: str = ""
    """A name for the weights and how they are loaded, in place of their fingerprint."""

    def options(self) -> Options:
        """For :meth:`toolgap.store.store.Store.open`."""
        return Options(
            limit_bytes=self.limit_bytes, fsync=self.fsync, read_path=self.read_path, readers=self.readers
        )


SGLANG_KEYS = frozenset(
    (
        *("backend_name", "module_path", "class_name", "interface_v1"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        *("hicache_storage_pass_prefix_keys", "tp_lcm_size"),
    )
)
"""What else SGLang has in the same object."""


def read(extra: dict[str, Any]) -> tuple[Path, StoreConfig]:
    """The folder and the settings.

    Raises:
        StoreError: the object names no folder, or has a key or a value that nobody knows.
    """
    own = {key: value for key, value in extra.items() if key not in SGLANG_KEYS}
    if unknown := sorted(own.keys() - set(StoreConfig.__struct_fields__)):
        raise StoreError(
            f"the extra config of the store has {', '.join(map(repr, unknown))}, which it does not know; it knows "
            f"{', '.join(StoreConfig.__struct_fields__)}"
        )
    try:
        config = msgspec.convert(own, StoreConfig)
    except msgspec.ValidationError as error:
        raise StoreError(f"the extra config of the store: {error}") from None
    path = config.path or os.environ.get(PATH, "")
    if not path:
        raise StoreError(f"no folder is named for the store: say path in the extra config, or set {PATH}")
    return Path(path).expanduser(), config


def arguments(config: StoreConfig, others: dict[str, Any] | None = None) -> list[str]:
    """SGLang's flags for a store; `others` is what else belongs into the same object."""
    extra = {
        **(others or {}),
        **{"backend_name": BACKEND_NAME, "module_path": MODULE, "class_name": CLASS, "interface_v1": 1},
        **msgspec.to_builtins(config),
    }
    return [
        *("--hicache-storage-backend", BACKEND),
        *("--hicache-storage-backend-extra-config", json.dumps(extra, sort_keys=True)),
    ]
