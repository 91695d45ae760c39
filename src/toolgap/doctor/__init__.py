"""``toolgap doctor``: why restores would not work here, each finding with its mend.

A module for each thing that is looked at. ``arguments`` puts together what ``rules``, ``store`` and ``prompt`` find
about a command line; ``server`` what ``rules``, ``endpoint`` and ``engine`` find about a running server's answers.

``inspect_installation``, ``inspect_store`` and ``ask_server`` gather plain values from this environment and from a
running server, and ``read_threshold`` may read a file. The ``check_*`` functions compute findings from plain values;
``check_arguments`` alone calls what gathers them.
"""
