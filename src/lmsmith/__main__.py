"""`python -m lmsmith` is `lmsmith`."""

from lmsmith.cli.main import main

raise SystemExit(main())
