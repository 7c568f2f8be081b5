"""What folders of models and adapters hold, by their small files and the heads of their large ones. Without torch and transformers."""
