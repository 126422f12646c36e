"""Long runs that break things on purpose; each is started by hand, and the tests call a small part of it."""
