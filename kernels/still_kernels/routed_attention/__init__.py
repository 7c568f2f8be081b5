"""The gated delta rule over chunks of which some are taken back: definition."""
