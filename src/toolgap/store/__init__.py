"""A verified L3 store of KV pages: segment files that are read straight into the caller's memory.

It knows bytes and keys, not SGLang: its adapter to HiCache is :mod:`toolgap.store.hicache`.
"""
