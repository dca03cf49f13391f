"""``python -m hypic_rag`` is the ``hypic-rag`` command."""

from hypic_rag.cli import main

main()
