"""How the processes of one computation find each other, hear of each other, and judge each other."""
