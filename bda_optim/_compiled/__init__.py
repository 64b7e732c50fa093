"""Room 6: steps that are traced and compiled."""
