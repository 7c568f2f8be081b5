"""Lightning attention: the gated rule with a decay that is each head's own and the same for all tokens; modules and mixer."""
