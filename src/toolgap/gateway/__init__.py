"""The gateway: a reverse proxy that sees tool calls and restores their continuations ahead."""
