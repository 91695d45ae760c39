"""Where and why a turn's prompt stops being an extension of the turn before it: ``toolgap check-prefix``."""
