"""Adapters: names, versions and content-addressed blobs."""
