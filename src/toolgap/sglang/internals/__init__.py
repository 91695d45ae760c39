"""The only place that names SGLang's volatile internals.

:func:`~toolgap.sglang.internals.targets.check` compares them with the installed release before anything is
hooked. The modules here are all that the rest of ``toolgap.sglang`` sees of SGLang's processes, requests,
scheduler and cache.
"""
