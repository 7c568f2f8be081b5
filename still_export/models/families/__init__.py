"""The classes of models, one file a family."""
