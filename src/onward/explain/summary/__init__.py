"""What a Program costs, scope by scope and pass by pass."""
