"""The load client: what a server does under a given load, seen from outside."""
