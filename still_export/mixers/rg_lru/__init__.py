"""The real-gated linear recurrent unit (RG-LRU): module and mixer."""
