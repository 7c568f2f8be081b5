"""Reading and drawing prompts and texts, for training, proof and measuring."""
