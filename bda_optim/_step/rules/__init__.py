"""Update rules: what makes a displacement of the lower gradient."""
