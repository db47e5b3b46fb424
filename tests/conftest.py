"""Makes `helpers` importable from every test folder (pytest puts this file's folder on the path)."""
