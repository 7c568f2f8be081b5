"""Quality of models and speed of packages."""
