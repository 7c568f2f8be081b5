"""Serving: concurrent requests share a package's model. scheduler decides, worker runs it, wire and app speak HTTP."""
