"""`python -m polygraft`."""

from polygraft.cli import main

main()
