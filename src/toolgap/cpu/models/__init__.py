"""The architectures of this package's models, for ``SGLANG_EXTERNAL_MODEL_PACKAGE``.

SGLang imports every model it has, some 150 modules, unless the one that it needs is found here.
"""
