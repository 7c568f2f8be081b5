"""Reports: one self-contained HTML file per verb, with tables and plots, that needs no network."""
