"""`python -m tools` is the `tools` command."""

from tools.cli import main

main()
