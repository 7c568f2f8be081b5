"""The gated rule with a decay per key channel, as in GLA and HGRN2: module and mixer."""
