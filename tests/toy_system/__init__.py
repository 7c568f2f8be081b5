"""A system of the tests' own: layers whose tokens get the mean of all values up to themselves."""
