"""GLA and Gated DeltaNet, replacing softmax attention but reusing its projections: modules and mixers."""
