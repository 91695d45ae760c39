"""What the benchmark cannot go on from."""


class BenchError(RuntimeError):
    """Something that ends the run; the text says what, and what to do about it."""
