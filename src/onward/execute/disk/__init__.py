"""Put things on the disk: whole or not at all, by one writer, sealed, every bit as it was."""
