"""Jobs between gateways and workers, in Redis."""
