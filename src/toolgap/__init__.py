"""Restore an agent's KV cache while its tool call runs."""
