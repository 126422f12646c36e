"""Options tried in processes of their own, and remembered."""
