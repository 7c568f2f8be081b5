"""From a softmax model to a STILL model: data, objectives, training loop, adapter."""
