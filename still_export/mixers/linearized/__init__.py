"""GLA and Gated DeltaNet in the place of softmax attention, with its projections: modules and mixers."""
