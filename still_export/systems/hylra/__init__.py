"""HyLRA: layers that read the blocks which an earlier layer has chosen. Nothing is trained."""
