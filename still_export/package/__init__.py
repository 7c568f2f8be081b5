"""The package folder: files, manifest, states."""
