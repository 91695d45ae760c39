"""What the answers of the four APIs say: a reader for each."""
