"""Someone's existing training step as a Program of one's own, which every transform takes."""
