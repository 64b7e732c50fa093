"""Room 2: the global state that surrounds an inner step."""
