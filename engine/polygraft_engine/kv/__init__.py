"""The paged KV cache as the host sees it: block ids, reference counts, block tables and prefix identity."""
