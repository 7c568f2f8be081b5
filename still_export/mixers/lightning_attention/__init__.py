"""Lightning attention: the gated rule with a constant decay for each head; modules and mixer."""
