"""The costs of a Program, scope by scope and pass by pass."""
