"""The bytes of a page in the orders of SGLang's host layouts, without SGLang.

A page of full attention is keys and then values, a page of latent attention one plane. Within a plane either all tokens
of a layer follow each other (``layer_first``, ``page_first_direct``) or all layers of a token (``page_first``): see
``get_data_page`` of SGLang's host pools.
"""

from enum import StrEnum
from typing import NamedTuple

from toolgap.store.errors import StoreError
from toolgap.store.namespace import Namespace

_PLANES = {"MHATokenToKVPoolHost": 2, "MLATokenToKVPoolHost": 1}


class Layout(StrEnum):
    """SGLang's ``--hicache-mem-layout``."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"


class PageForm(NamedTuple):
    """How a store's pages are laid out."""

    planes: int
    layers: int
    tokens: int
    layout: Layout

    @classmethod
    def of(cls, namespace: Namespace) -> "PageForm":
        """That of a namespace's KV pool.

        Raises:
            StoreError: other pools and layouts have other pages.
        """
        pool, *facts = namespace.layout.split()
        told = dict(fact.split("=", 1) for fact in facts if "=" in fact)
        try:
            form = cls(
                _PLANES[pool], int(told["layer_num"]), namespace.page_size_tokens, Layout(told["layout"])
            )
        except (KeyError, ValueError):
            raise StoreError(f"pages of another form cannot be imported into {namespace.layout!r}") from None
        if form.layout is Layout.LAYER_FIRST and "in-place" in facts:
            raise StoreError(
                "the store's pages lie piece by piece: start its server with page_first, and import then"
            )
        return form

    def from_layout(self, layout: Layout, page: bytearray) -> bytearray:
        """A page of another layout in this one's order.

        Raises:
            ValueError: it cannot be a page of so many tokens and layers.
        """
        rows = self.planes * self.layers * self.tokens
        if len(page) % rows:
            raise ValueError(f"a page of {len(page)} bytes does not consist of {rows} rows")
        is_by_token = self.layout is Layout.PAGE_FIRST
        if is_by_token is (layout is Layout.PAGE_FIRST):
            return page
        row = len(page) // rows
        outer, inner = (self.layers, self.tokens) if is_by_token else (self.tokens, self.layers)
        turned = bytearray(len(page))
        source, target = memoryview(page), memoryview(turned)
        plane_bytes = outer * inner * row
        for plane in range(0, len(page), plane_bytes):
            for first in range(outer):
                for second in range(inner):
                    old = plane + (first * inner + second) * row
                    new = plane + (second * outer + first) * row
                    target[new : new + row] = source[old : old + row]
        return turned
