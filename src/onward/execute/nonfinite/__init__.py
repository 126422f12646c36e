"""Which op made the first number that is not finite."""
