"""Linear attention with a recurrent state: traced op, and what the modules of its layers share."""
