"""Linear attention with a recurrent state: what the modules of its layers share."""
