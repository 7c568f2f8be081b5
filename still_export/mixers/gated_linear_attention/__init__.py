"""The gated rule with a decay per key channel, as GLA and HGRN2 have it: module and mixer."""
