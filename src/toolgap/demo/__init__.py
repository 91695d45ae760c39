"""``toolgap demo``: one agent turn on a real engine, its continuation served three ways."""
