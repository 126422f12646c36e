"""One training Program for trainers and parameter servers: who owns what, who runs what, what travels."""
