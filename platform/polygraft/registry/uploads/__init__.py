"""Adapters on their way in: received, opened and checked before anybody can call them."""
