"""Integrations with other training libraries. Import the module of each library that you use."""
