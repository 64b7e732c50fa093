"""Room 4: one inner step as a pure function."""
