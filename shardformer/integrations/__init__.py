"""Integrations with other training libraries. Import the module of the library: none is imported here."""
