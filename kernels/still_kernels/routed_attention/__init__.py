"""The gated delta rule over chunks, some of which are reverted: definition."""
