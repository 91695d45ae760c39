"""What the demo cannot go on from, told to the user without a traceback."""


class DemoError(Exception):
    """Something that ends the demo; the text says what, and what to do about it."""


class DemoUsageError(DemoError):
    """It was asked for something that cannot be."""
