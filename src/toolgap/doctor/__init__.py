"""``toolgap doctor``: why restores would not work here, each finding with its mend.

The ``check_*`` functions are pure: they compute findings from plain values. ``inspect_installation``,
``inspect_store`` and ``ask_server`` gather those values from this environment and from a running server.
"""
