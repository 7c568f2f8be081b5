"""Describe model and adapter folders by small files and headers of large ones, without torch and transformers."""
