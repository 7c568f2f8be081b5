"""Hook of mkdocs: the site has the repository's paths, so links between its pages work in both."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("*.md", "LICENSE", "docs/*/**/*", "assets/*/README.md", "examples/*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and those of the repository that the site shows, under the names that they have there."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted({path.relative_to(ROOT) for shown in SHOWN for path in ROOT.glob(shown) if path.is_file()})
    pages = [File(path.as_posix(), str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    return Files([*theme, *pages])
