"""Room 3: a module as a function of its parameters."""
