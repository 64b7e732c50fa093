"""Room 8: what can be measured of an inner loop before it is trusted, and what to choose."""
