"""From JSON lines or parquet to ``.bin``/``.idx``: torch-free, so that it runs on a tokenizing node."""
