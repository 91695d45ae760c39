"""What the store raises: only while it is opened, and only what a person can mend."""


class StoreError(Exception):
    """The store cannot be opened or used as asked. The message says what is wrong and what to do."""
