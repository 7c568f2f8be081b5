"""Reports to look at: one HTML file of a verb's results, with tables and plots, that needs nothing else and no network."""
