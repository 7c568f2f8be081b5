"""HyLRA: layers that read blocks chosen by an earlier layer. Nothing is trained."""
