"""What reads pages of KV from storage, and how fast: contenders, one harness, one report."""
