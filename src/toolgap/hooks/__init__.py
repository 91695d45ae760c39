"""Hooks for agent libraries: the start of a tool call submits, its end refreshes, the session's end cancels.

One module a library, each an optional import; docs/agents.md has the lines that plug them in. What they share:
``tool_calls`` decides what is sent when, ``restores`` sends it from a thread of its own.
"""
