"""`python -m commhooks`."""

from commhooks.cli import main

raise SystemExit(main())
